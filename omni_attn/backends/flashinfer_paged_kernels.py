"""FlashInfer over a paged KV cache: what its two wrappers can do, and how they are imported.

Read in flashinfer-python 0.6.18 and 0.7.4.

variant   prefill and mixed batches                          one query token of each request
fa3       BatchPrefillWithPagedKVCacheWrapper(backend=fa3)   BatchDecodeWithPagedKVCacheWrapper
fa2       BatchPrefillWithPagedKVCacheWrapper(backend=fa2)   the same
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from omni_attn.backends.flashinfer_kernels import FLASHINFER_FACTS, WRAPPER_PACKAGE
from omni_attn.backends.optional_package import check_keywords, import_symbols
from omni_attn.facts import AttentionCGSupport, BackendFacts, CacheFacts, CapabilityRange, MultipleOf, Variant

_PREFILL, _DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
# Earlier versions translate pages of variant fa3 into a buffer of fixed size.
PAGED_WRAPPER_PACKAGE = replace(WRAPPER_PACKAGE, symbols=(_PREFILL, _DECODE), minimum="0.6.18")

_PAGED = replace(
    FLASHINFER_FACTS,
    packages=(PAGED_WRAPPER_PACKAGE,),
    mask_kinds=frozenset(),
    float_masks=True,
    head_masks=True,
    causal_with_mask=False,
    lse=False,
    compile_mode="custom_op",
    sequence_parallel=frozenset(),
    cache=CacheFacts(
        block_sizes=(MultipleOf(base=1),), host_lengths=True, cudagraph=AttentionCGSupport.ALWAYS
    ),
    tested_on=("sm_90 (H200)",),
)
FLASHINFER_PAGED_FACTS = BackendFacts.of(
    _PAGED,
    summary="FlashInfer over the pages of a KV cache, planned once per step",
    error="2.3e-3",
    variants=(
        Variant(
            name="fa3", facts=replace(_PAGED, capabilities=(CapabilityRange(minimum=(9, 0), below=(10, 0)),))
        ),
        Variant(name="fa2", facts=_PAGED),
    ),
)

# Parameters that the calls use, by function; a version without one of them is refused when a layer is built.
_PAGES = {
    "num_qo_heads",
    "num_kv_heads",
    "page_size",
    "window_left",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
}
_PARAMETERS = {
    (_PREFILL, "__init__"): {"float_workspace_buffer", "kv_layout", "use_cuda_graph", "backend"}
    | {"qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"},
    (_PREFILL, "plan"): {"qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"}
    | {"head_dim_qk", "causal", *_PAGES},
    (_PREFILL, "run"): {"q", "paged_kv_cache", "out"},
    (_DECODE, "__init__"): {"float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores"}
    | {"paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer", "backend"},
    (_DECODE, "plan"): {"indptr", "indices", "last_page_len", "head_dim", *_PAGES},
    (_DECODE, "run"): {"q", "paged_kv_cache", "out"},
}


class PagedWrappers(NamedTuple):
    """The two wrapper classes."""

    prefill: Callable[..., Any]
    decode: Callable[..., Any]


def import_paged_wrappers(variant: str | None) -> PagedWrappers:
    """Imports the wrapper classes.

    Raises:
        BackendImportError: FlashInfer is not installed, or importing it fails, or a class or parameter is missing.
    """
    label = f"FLASHINFER_ATTN ({variant or 'fa2'})"
    classes = import_symbols(label, PAGED_WRAPPER_PACKAGE)
    for (name, method), parameters in _PARAMETERS.items():
        function = getattr(classes[name], method)
        check_keywords(label, PAGED_WRAPPER_PACKAGE, function, *sorted(parameters))
    return PagedWrappers(classes[_PREFILL], classes[_DECODE])
