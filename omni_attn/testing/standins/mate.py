"""A stand-in for mate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.flash import attend, attend_varlen, check_layout, lose_dead_rows
from omni_attn.testing.standins.log import CallLog


@contextmanager
def mate_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the module in place."""
    with fake_package("mate", flash_attn_varlen_func=MateStandIn(log).flash_attn_varlen_func):
        yield


class MateStandIn:
    """mate's one forward function: packed with boundaries, dense without. A row without a key holds NaN here."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        return_attn_probs: bool = False,
        return_softmax_lse: bool = False,
    ) -> Any:
        """Output [T, H, D] or [B, Sq, H, D], and lse [B, H, Sq] of a dense call if asked for."""
        dense = cu_seqlens_q is None
        self.log.calls.append("flash_attn_varlen_func, dense" if dense else "flash_attn_varlen_func")
        if cu_seqlens_q is not None:
            assert cu_seqlens_k is not None and max_seqlen_q is not None and max_seqlen_k is not None
            bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            assert not (return_attn_probs or return_softmax_lse), "not asked of packed calls"
            return attend_varlen(q, k, v, *bounds, softmax_scale, causal, window_size)
        assert cu_seqlens_k is None and max_seqlen_q is None and max_seqlen_k is None
        check_layout(4, q, k, v)
        output, lse = lose_dead_rows(*attend(q, k, v, softmax_scale, causal, window_size))
        return (output, lse) if return_attn_probs or return_softmax_lse else output
