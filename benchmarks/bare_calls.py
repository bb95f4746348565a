"""Kernels called by hand, as somebody without a dispatcher would: what a dispatcher's host time is held against.

Each works on the same [B, S, H, D] tensors, with the views that its own layout needs, and with everything prepared that
can be prepared before the first layer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Call = Callable[[], torch.Tensor]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True)
class BareKernel:
    """A backend's kernel by hand, and the name that diffusers has for the same kernel, if it has it."""

    backend: str
    variant: str | None
    call: Call
    diffusers: str | None = None


def bare_kernels(tensors: Tensors) -> Iterator[BareKernel]:
    """Every kernel whose package is here and that takes these tensors; the others are named with the reason."""
    builders: list[Callable[[Tensors], BareKernel]] = [_sdpa]
    if tensors[0].is_cuda:
        builders += [_cudnn, _flash_3, _flash_2, _flash_4, _flex, _sage_1, _fmha_v2]
        builders += [lambda t: _flashinfer(t, "fa3"), lambda t: _flashinfer(t, "fa2")]
    for build in builders:
        try:
            kernel = build(tensors)
            kernel.call()
        except Exception as error:
            print(
                f"not here: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
            )
        else:
            yield kernel


def _heads_first(tensors: Tensors) -> Tensors:
    query, key, value = tensors
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _sdpa(tensors: Tensors) -> BareKernel:
    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(*_heads_first(tensors)).transpose(1, 2)

    return BareKernel("TORCH_SDPA", None, call, "native")


def _cudnn(tensors: Tensors) -> BareKernel:
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default

    def call() -> torch.Tensor:
        output: torch.Tensor = operator(*_heads_first(tensors), None, False)[0]
        return output.transpose(1, 2)

    return BareKernel("CUDNN_ATTN", None, call, "_native_cudnn")


def _flash_3(tensors: Tensors) -> BareKernel:
    function = importlib.import_module("flash_attn_interface").flash_attn_func
    return BareKernel("FLASH_ATTN", "fa3", lambda: function(*tensors), "_flash_3")


def _flash_2(tensors: Tensors) -> BareKernel:
    function = importlib.import_module("flash_attn").flash_attn_func
    return BareKernel("FLASH_ATTN", "fa2", lambda: function(*tensors), "flash")


def _flash_4(tensors: Tensors) -> BareKernel:
    function = importlib.import_module("flash_attn.cute").flash_attn_func
    return BareKernel("FLASH_ATTN", "fa4", lambda: function(*tensors)[0])


def _flex(tensors: Tensors) -> BareKernel:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return BareKernel("FLEX_ATTN", None, lambda: compiled(*_heads_first(tensors)).transpose(1, 2), "flex")


def _sage_1(tensors: Tensors) -> BareKernel:
    function = importlib.import_module("sageattention").sageattn
    return BareKernel("SAGE_ATTN", "sage1", lambda: function(*tensors, tensor_layout="NHD"), "sage")


def _flashinfer(tensors: Tensors, variant: str) -> BareKernel:
    prefill = importlib.import_module("flashinfer.prefill")
    query, key, value = tensors
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    wrapper = prefill.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=variant)
    boundaries = (torch.tensor([0, x.shape[1]], dtype=torch.int32) for x in (query, key))
    wrapper.plan(*boundaries, query.shape[2], key.shape[2], query.shape[3], q_data_type=query.dtype)
    return BareKernel("FLASHINFER_ATTN", variant, lambda: wrapper.run(query[0], key[0], value[0])[None])


def _fmha_v2(tensors: Tensors) -> BareKernel:
    function = importlib.import_module("flashinfer.prefill").trtllm_fmha_v2_prefill
    query, key, value = tensors
    tokens, device = query.shape[1], query.device
    boundaries = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    arguments = {
        "input_layout": "SEPARATE_Q_K_V",
        "workspace_buffer": torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "seq_lens": boundaries[1:],
        "max_q_len": tokens,
        "max_kv_len": tokens,
        "bmm1_scale": query.shape[3] ** -0.5,
        "bmm2_scale": 1.0,
        "batch_size": 1,
        "cum_seq_lens_q": boundaries,
        "cum_seq_lens_kv": boundaries,
        "mask_mode": "padding",
    }
    return BareKernel(
        "TRTLLM_ATTN", "fmha_v2", lambda: function((query[0], key[0], value[0]), **arguments)[None]
    )
