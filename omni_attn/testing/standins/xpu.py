"""A stand-in for vllm-xpu-kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.flash import attend_varlen
from omni_attn.testing.standins.log import CallLog

MODULE = "vllm_xpu_kernels.flash_attn_interface"


@contextmanager
def xpu_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the module in place."""
    with fake_package(MODULE, flash_attn_varlen_func=XpuStandIn(log).flash_attn_varlen_func):
        yield


class XpuStandIn:
    """flash_attn_varlen_func of vllm-xpu-kernels, whose arguments stand in an order of their own: lengths first.

    A row without a key holds NaN here.
    """

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        q_v: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] | None = None,
        softcap: float = 0.0,
        block_table: torch.Tensor | None = None,
        return_softmax_lse: bool = False,
    ) -> Any:
        """Output [T, H, D] of sequences between boundaries."""
        self.log.calls.append("flash_attn_varlen_func")
        assert isinstance(max_seqlen_q, int) and isinstance(cu_seqlens_q, torch.Tensor), (
            "arguments by keyword"
        )
        assert (
            cu_seqlens_k is not None and seqused_k is None and block_table is None and not return_softmax_lse
        )
        left, right = (-1, -1) if window_size is None else window_size
        bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attend_varlen(q, k, v, *bounds, softmax_scale, causal, (left, right))
