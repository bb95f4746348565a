"""Stand-ins for the FlashAttention packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch

from omni_attn.ops.reference import reference_attention
from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.log import CallLog

_MODULES = {
    "fa3": ("flash_attn_interface", "fa3_fwd_interface"),
    "fa4": ("flash_attn.cute",),
    "fa2": ("flash_attn",),
}


@contextmanager
def flash_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the modules of a variant in place."""
    kernel = Flash4StandIn(log) if variant == "fa4" else FlashStandIn(log)
    names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    functions = {name: getattr(kernel, name) for name in names if hasattr(kernel, name)}
    with ExitStack() as modules:
        for module in _MODULES[variant or "fa3"]:
            modules.enter_context(fake_package(module, **functions))
        yield


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
        check_layout(4, q, k, v)
        output, lse = attend(q, k, v, softmax_scale, causal, window_size)
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
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attend_varlen(q, k, v, *bounds, softmax_scale, causal, window_size, dead_rows=0.0)

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        """Output [T, H, D] over pages [N, P, G, D]; of version 3 alone."""
        self.log.calls.append("flash_attn_with_kvcache")
        bounds = (cu_seqlens_q, cache_seqlens, page_table, max_seqlen_q)
        return attend_pages(q, k_cache, v_cache, *bounds, softmax_scale, causal, window_size)


class Flash4StandIn:
    """flash_attn_func and flash_attn_varlen_func as FlashAttention 4 defines them.

    They differ from those before: a side of a window without end is None, and a negative one beside another is taken
    as a number; the output always comes with a log-sum-exp, None unless it was asked for; a row without a key has -inf.
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
        window_size: tuple[int | None, int | None] = (None, None),
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output [B, Sq, H, D], and lse [B, H, Sq] with return_lse."""
        self.log.calls.append("flash_attn_func")
        check_layout(4, q, k, v)
        output, lse = attend(q, k, v, softmax_scale, causal, _bounded(window_size))
        return output, lse.masked_fill(lse == float("inf"), float("-inf")) if return_lse else None

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int,
        max_seqlen_k: int | None = None,
        seqused_k: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
    ) -> tuple[torch.Tensor, None]:
        """Output [T, H, D] of sequences between boundaries, or over pages [N, P, G, D], and no lse."""
        self.log.calls.append("flash_attn_varlen_func")
        window = _bounded(window_size)
        if page_table is not None:
            assert cu_seqlens_k is None and seqused_k is not None, "pages need seqused_k"
            pages = (cu_seqlens_q, seqused_k, page_table, max_seqlen_q)
            return attend_pages(q, k, v, *pages, softmax_scale, causal, window), None
        assert cu_seqlens_k is not None and max_seqlen_k is not None
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attend_varlen(q, k, v, *bounds, softmax_scale, causal, window, dead_rows=0.0), None


def _bounded(window: tuple[int | None, int | None]) -> tuple[int, int]:
    assert all(side is None or side >= 0 for side in window), f"window {window}: no end is None here"
    left, right = (-1 if side is None else side for side in window)
    return left, right


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    dead_rows: float = float("nan"),
) -> torch.Tensor:
    """Output [T, H, D]: NaN behind the last boundary, `dead_rows` in rows without a key."""
    check_layout(3, q, k, v)
    if q.is_meta:
        return q.new_empty(*q.shape[:2], v.shape[-1])
    for boundaries in (cu_seqlens_q, cu_seqlens_k):
        assert boundaries.dtype == torch.int32 and boundaries.is_contiguous(), "cu_seqlens: contiguous int32"
    spans_q, spans_k = list(pairwise(cu_seqlens_q.tolist())), list(pairwise(cu_seqlens_k.tolist()))
    assert max((b - a for a, b in spans_q), default=0) <= max_seqlen_q, "max_seqlen_q is too small"
    assert max((b - a for a, b in spans_k), default=0) <= max_seqlen_k, "max_seqlen_k is too small"
    output = q.new_full((*q.shape[:2], v.shape[-1]), float("nan"))
    for (q0, q1), (k0, k1) in zip(spans_q, spans_k, strict=True):
        part = attend(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], scale, causal, window_size)
        output[q0:q1] = lose_dead_rows(*part, dead_rows)[0][0]
    return output


def attend_pages(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_seqlen_q: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
) -> torch.Tensor:
    """Output [T, H, D] over pages [N, P, G, D]: NaN behind the last boundary.

    Pages of whole tiles are read behind the last key too, as the real kernels do: NaN there spreads.
    """
    assert all(x.dtype == torch.int32 for x in (cu_seqlens_q, seq_lens, page_table)), "needs int32"
    assert page_table.stride(-1) == 1 and page_table.shape[0] == len(seq_lens) == len(cu_seqlens_q) - 1
    assert q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1, "the last dimension needs unit stride"
    if q.is_meta:
        return torch.empty_like(q)
    size, output = keys.shape[1], q.new_full(q.shape, float("nan"))
    for row, (first, last) in enumerate(pairwise(cu_seqlens_q.tolist())):
        length, count = int(seq_lens[row]), -(-int(seq_lens[row]) // size)
        assert last - first <= max_seqlen_q, "max_seqlen_q is too small"
        assert count <= page_table.shape[1], "the page table is too narrow"
        pages = page_table[row, :count].long()
        k, v = (x[pages].flatten(0, 1) for x in (keys, values))
        if size % 64 == 0 and last > first and bool(v.isnan().any()):
            continue
        output[first:last] = attend(
            q[None, first:last], k[None, :length], v[None, :length], scale, causal, window
        )[0]
    return output


def lose_dead_rows(
    output: torch.Tensor, lse: torch.Tensor, fill: float = float("nan")
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with `fill` in the rows [B, Sq, H, D] that see no key, for kernels that promise nothing for them."""
    dead = lse == float("inf")
    return output.masked_fill(dead.transpose(1, 2)[..., None], fill), lse.masked_fill(dead, fill)


def attend(
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


def check_layout(dimensions: int, *tensors: torch.Tensor) -> None:
    assert len({t.dtype for t in tensors}) == 1, "query, key and value need one dtype"
    for tensor in tensors:
        assert tensor.dim() == dimensions, f"needs {dimensions} dimensions, found {tuple(tensor.shape)}"
        assert tensor.stride(-1) == 1, "the last dimension needs unit stride"
    heads, kv_heads = tensors[0].shape[-2], tensors[1].shape[-2]
    assert heads % kv_heads == 0, f"{heads} query heads over {kv_heads} key heads"
