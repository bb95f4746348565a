"""A stand-in for the flash functions of aiter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.flash import attend, attend_varlen, check_layout, lose_dead_rows
from omni_attn.testing.standins.log import CallLog


@contextmanager
def aiter_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the module in place."""
    kernel = AiterStandIn(log)
    functions = {name: getattr(kernel, name) for name in ("flash_attn_func", "flash_attn_varlen_func")}
    with fake_package("aiter", **functions):
        yield


class AiterStandIn:
    """flash_attn_func and flash_attn_varlen_func as aiter defines them.

    The log-sum-exp comes with `return_lse`; `return_attn_probs` asks for dropout's mask. Inputs that require a
    gradient need the log-sum-exp. What a row without a key holds is not stated: NaN here.
    """

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def flash_attn_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, ...] = (-1, -1, 0),
        bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = True,
        return_lse: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        """Output [B, Sq, H, D], with return_lse also lse [B, H, Sq]."""
        self.log.calls.append("flash_attn_func")
        assert dropout_p == 0.0 and bias is None and alibi_slopes is None and not return_attn_probs
        assert window_size[:2] == (-1, -1), "windows are not asked of aiter"
        check_layout(4, q, k, v)
        output, lse = lose_dead_rows(*attend(q, k, v, softmax_scale, causal, (-1, -1)))
        return (output, lse) if return_lse else output

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        min_seqlen_q: int = 0,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        logits_soft_cap: float = 0.0,
        causal: bool = False,
        window_size: tuple[int, ...] = (-1, -1, 0),
        bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        """Output [T, H, D] of sequences between boundaries."""
        self.log.calls.append("flash_attn_varlen_func")
        assert dropout_p == 0.0 and logits_soft_cap == 0.0 and window_size[:2] == (-1, -1)
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attend_varlen(q, k, v, *bounds, softmax_scale, causal, (-1, -1))
