"""Candidates for one call over a paged cache: kernels of other packages called by hand, our layers, dense attention.

All read the same query and the same pages, in NHD order; everything that can be prepared before the first layer is.
Peers are called as their public documentation has it: FlashAttention 3 and 4 with a page table, FlashInfer through its
wrappers, planned from host tensors.

Legend: see paged_inputs.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from benchmarks.layer_calls import layer_call, try_each
from benchmarks.paged_inputs import PagedInputs
from benchmarks.rounds import Candidate
from omni_attn import AttentionMetadata, use_attention_config
from omni_attn.kv_cache import init_attention_groups, make_step, split_pages
from omni_attn.paged_layer import PagedAttention

DEFAULT = "default"
"""The word for the platform's own choice among backends."""
WORKSPACE_BYTES = 256 << 20

Call = Callable[[], torch.Tensor]


def candidates(
    inputs: PagedInputs, backends: Iterable[str], *, peers: bool
) -> list[Candidate | tuple[str, Exception]]:
    """A candidate for each, or its name and why it is not here.

    Args:
        backends: ours, as NAME, NAME:variant or DEFAULT; the first one also with the write of the new tokens.
        peers: other packages' kernels as well.
    """
    makers: dict[str, Callable[[], Candidate]] = {}
    if not inputs.case.causal:
        makers["dense"] = partial(_dense, inputs)
    if peers:
        makers |= {name: partial(_peer, name, make, inputs) for name, make in peers_of(inputs).items()}
    words = list(backends)
    makers |= {f"ours, {word}": partial(_ours, inputs, word) for word in words}
    makers |= {
        f"ours, {word}, with its write": partial(_ours, inputs, word, write=True) for word in words[:1]
    }
    return try_each(makers)


def spec_of(word: str) -> dict[str, Any]:
    """The configuration that NAME, NAME:variant or DEFAULT asks for."""
    if word == DEFAULT:
        return {}
    name, _, variant = word.partition(":")
    return {"default": {"backend": name} | ({"variant": variant} if variant else {})}


def peers_of(inputs: PagedInputs) -> dict[str, Callable[[PagedInputs], Call]]:
    """Makers of peers' calls by name, those that serve such a case."""
    peers: dict[str, Callable[[PagedInputs], Call]] = {
        "FlashAttention 3": _flash_3,
        "FlashAttention 4": _flash_4,
    }
    kinds = ("fa3", "fa2") if inputs.case.query_len > 1 else ("fa3",)
    peers |= {f"FlashInfer prefill {kind}": partial(_flashinfer_prefill, kind) for kind in kinds}
    if inputs.case.query_len == 1:
        for tensor_cores in (True, False):
            words = "FlashInfer decode" + (", tensor cores" if tensor_cores else "")
            peers[words] = partial(_flashinfer_decode, tensor_cores)
    return peers


def _peer(name: str, make: Callable[[PagedInputs], Call], inputs: PagedInputs) -> Candidate:
    return Candidate(name=name, kind="peer", call=make(inputs))


def _dense(inputs: PagedInputs) -> Candidate:
    """The same attention over keys and values that lie in one piece, where requests are one batch."""
    query = inputs.query.view(inputs.case.reqs, -1, *inputs.query.shape[1:])
    spec = {"backend": "FLASH_ATTN", "variant": "fa3"} if inputs.device.type == "cuda" else None
    call = layer_call((query, inputs.keys, inputs.values), spec, AttentionMetadata())
    return Candidate(
        name=f"dense, {call.label}", kind="dense", call=call, raster=lambda output: output.flatten(0, 1)
    )


def _ours(inputs: PagedInputs, word: str, *, write: bool = False) -> Candidate:
    """Our layer. Without its write, the cache holds the new tokens as it does for the peers."""
    case = inputs.case
    lengths = {"self": (case.query_len, case.keys)}
    with use_attention_config(spec_of(word), device=inputs.device, dtype=inputs.query.dtype, lengths=lengths):
        layer = PagedAttention(
            case.heads,
            case.head_size,
            role="self",
            num_kv_heads=case.kv_heads,
            causal=case.causal,
            kv_cache=inputs.spec,
            prefix="layer",
        )
    (group,) = groups = init_attention_groups([layer], {"self": inputs.spec}, inputs.device)
    pages = split_pages(inputs.kv_cache, group.kernel_spec.block_size)
    common = inputs.common.replace(slot_mapping=inputs.slots) if write else inputs.common
    step = make_step(groups, {"self": common}, {"layer": pages})["layer"]
    new = [x[:, case.history :].flatten(0, 1) if write else None for x in (inputs.keys, inputs.values)]
    output = torch.empty_like(inputs.query)
    label = f"{DEFAULT}: {group.selection.label}" if word == DEFAULT else group.selection.label
    kind = "default" if word == DEFAULT else "ours"
    return Candidate(
        name=f"ours, {label}" + (", with its write" if write else ""),
        kind=f"{kind}, written" if write else kind,
        call=lambda: layer(inputs.query, *new, step, output),
    )


def _flash_3(inputs: PagedInputs) -> Call:
    function = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    key, value = inputs.kv_cache.unbind(1)
    return partial(
        function,
        inputs.query,
        key,
        value,
        cache_seqlens=inputs.lengths,
        page_table=inputs.block_table,
        cu_seqlens_q=inputs.starts,
        max_seqlen_q=inputs.case.query_len,
        causal=inputs.case.causal,
    )


def _flash_4(inputs: PagedInputs) -> Call:
    function = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    key, value = inputs.kv_cache.unbind(1)
    call = partial(
        function,
        inputs.query,
        key,
        value,
        cu_seqlens_q=inputs.starts,
        max_seqlen_q=inputs.case.query_len,
        seqused_k=inputs.lengths,
        max_seqlen_k=inputs.case.keys,
        page_table=inputs.block_table,
        causal=inputs.case.causal,
    )
    return lambda: _first(call())


def _flashinfer_prefill(kind: str, inputs: PagedInputs) -> Call:
    wrapper_cls = importlib.import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper
    wrapper = wrapper_cls(_workspace(inputs), "NHD", backend=kind)
    case, dtype = inputs.case, inputs.query.dtype
    sizes = (case.heads, case.kv_heads, case.head_size, case.block_size)
    wrapper.plan(
        inputs.starts_cpu, *_page_lists(inputs), *sizes, causal=case.causal, q_data_type=dtype, kv_data_type=dtype
    )  # fmt: skip
    return partial(wrapper.run, inputs.query, inputs.kv_cache.unbind(1))


def _flashinfer_decode(tensor_cores: bool, inputs: PagedInputs) -> Call:
    wrapper_cls = importlib.import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper
    wrapper = wrapper_cls(_workspace(inputs), "NHD", use_tensor_cores=tensor_cores)
    case, dtype = inputs.case, inputs.query.dtype
    sizes = (case.heads, case.kv_heads, case.head_size, case.block_size)
    wrapper.plan(*_page_lists(inputs), *sizes, q_data_type=dtype, kv_data_type=dtype)
    return partial(wrapper.run, inputs.query, inputs.kv_cache.unbind(1))


def _workspace(inputs: PagedInputs) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)


def _page_lists(inputs: PagedInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pages of all requests as FlashInfer takes them: boundaries, page numbers, tokens of each last page."""
    reqs, width = inputs.block_table_cpu.shape
    boundaries = width * torch.arange(reqs + 1, dtype=torch.int32)
    last = (inputs.lengths_cpu - 1) % inputs.case.block_size + 1
    return boundaries, inputs.block_table.flatten(), last


def _first(output: Any) -> torch.Tensor:
    """The output of a kernel that may give its lse as well."""
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found
