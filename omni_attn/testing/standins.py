"""Stand-in kernels on the CPU: the real calling conventions and quirks, reference numbers, counted calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from omni_attn.backends import cudnn_attn
from omni_attn.ops.reference import reference_attention
from omni_attn.testing.packages import fake_package


@dataclass
class CallLog:
    """Names of the kernel functions that were called, in order."""

    calls: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.calls)


class FlashStandIn:
    """flash_attn_func and flash_attn_varlen_func as FlashAttention 2 and 3 define them.

    Like the real ones: [B, S, H, D], one dtype, unit stride along D, causal aligned at the bottom right, zeros with
    lse = +inf for a row without a key, and nothing written behind the last boundary (NaN here).
    """

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def flash_attn_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        return_attn_probs: bool = False,
    ) -> Any:
        """Output [B, Sq, H, D], with return_attn_probs also lse [B, H, Sq]."""
        self.log.calls.append("flash_attn_func")
        _check_layout(4, q, k, v)
        output, lse = _attend(q, k, v, softmax_scale, causal, window_size)
        return (output, lse) if return_attn_probs else output

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        """Output [T, H, D] of sequences between boundaries."""
        self.log.calls.append("flash_attn_varlen_func")
        _check_layout(3, q, k, v)
        for boundaries in (cu_seqlens_q, cu_seqlens_k):
            assert boundaries.dtype == torch.int32 and boundaries.is_contiguous(), (
                "cu_seqlens: contiguous int32"
            )
        spans_q, spans_k = list(pairwise(cu_seqlens_q.tolist())), list(pairwise(cu_seqlens_k.tolist()))
        assert max((b - a for a, b in spans_q), default=0) <= max_seqlen_q, "max_seqlen_q is too small"
        assert max((b - a for a, b in spans_k), default=0) <= max_seqlen_k, "max_seqlen_k is too small"
        output = q.new_full((*q.shape[:2], v.shape[-1]), float("nan"))
        for (q0, q1), (k0, k1) in zip(spans_q, spans_k, strict=True):
            part = _attend(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], softmax_scale, causal, window_size)
            output[q0:q1] = part[0][0]
        return output


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    window = None if window_size == (-1, -1) else window_size
    output, lse = reference_attention(q, k, v, softmax_scale=scale, causal=causal, window=window)
    return output.to(q.dtype), lse.float().masked_fill(lse == float("-inf"), float("inf"))


def _check_layout(dimensions: int, *tensors: torch.Tensor) -> None:
    assert len({t.dtype for t in tensors}) == 1, "query, key and value need one dtype"
    for tensor in tensors:
        assert tensor.dim() == dimensions, f"needs {dimensions} dimensions, found {tuple(tensor.shape)}"
        assert tensor.stride(-1) == 1, "the last dimension needs unit stride"
    heads, kv_heads = tensors[0].shape[-2], tensors[1].shape[-2]
    assert heads % kv_heads == 0, f"{heads} query heads over {kv_heads} key heads"


class CuDNNStandIn:
    """aten::_scaled_dot_product_cudnn_attention: [B, H, S, D], additive finite bias, causal aligned at the top left."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """The operator's nine results; only the first two are filled."""
        self.log.calls.append("_scaled_dot_product_cudnn_attention")
        assert dropout_p == 0.0 and not return_debug_mask
        assert query.shape[1] % key.shape[1] == 0 and key.shape == value.shape
        assert query.dtype == key.dtype == value.dtype, "cuDNN reads key and value as query's dtype"
        for tensor in (query, key, value):
            assert tensor.stride(-1) == 1, "the last dimension needs unit stride"
        mask = attn_bias
        if mask is not None:
            assert mask.dtype == query.dtype, f"bias {mask.dtype} with query {query.dtype}"
            assert bool(torch.isfinite(mask).all()), "cuDNN turns an infinite bias into NaN"
            assert not is_causal
        if is_causal:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
        layout = (x.transpose(1, 2) for x in (query, key, value))
        output, lse = reference_attention(*layout, softmax_scale=scale, attn_mask=mask)
        results = (
            output.transpose(1, 2).to(query.dtype),
            lse.float()[..., None] if compute_log_sumexp else None,
        )
        return (*results, *(None,) * 7)


_FLASH_MODULES = {"fa3": ("flash_attn_interface", "fa3_fwd_interface"), "fa2": ("flash_attn",)}


@contextmanager
def fake_kernels(backend: str, variant: str | None = None) -> Iterator[CallLog]:
    """Stand-in kernels behind a built-in backend's real classes; TORCH_SDPA runs as it is.

    Args:
        backend: public name; variant: which of its variants.

    Yields:
        The log of kernel calls.
    """
    log = CallLog()
    if backend == "FLASH_ATTN":
        kernel = FlashStandIn(log)
        functions = {name: getattr(kernel, name) for name in ("flash_attn_func", "flash_attn_varlen_func")}
        with ExitStack() as modules:
            for module in _FLASH_MODULES[variant or "fa3"]:
                modules.enter_context(fake_package(module, **functions))
            yield log
    elif backend == "CUDNN_ATTN":
        stand_in = CuDNNStandIn(log)
        with patch.object(cudnn_attn, "cudnn_operator", lambda: stand_in):
            yield log
    else:
        yield log
