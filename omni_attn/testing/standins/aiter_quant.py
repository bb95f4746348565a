"""A stand-in for aiter's MHA v4, which quantises nothing: the numbers are the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch

from omni_attn.ops.reference import reference_attention
from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.log import CallLog

MODULE = "aiter.ops.mha_v4"


class AttentionFormat(IntEnum):
    """The formats that recipes name, with aiter's numbers."""

    BF16 = 2
    FP8_E4M3 = 3
    FP8_E4M3_FNUZ = 4
    MXFP6 = 7
    MXFP4 = 9
    INT8 = 10


_FP8 = (AttentionFormat.FP8_E4M3, AttentionFormat.FP8_E4M3_FNUZ)
_VALUES = {
    AttentionFormat.BF16: (AttentionFormat.BF16, *_FP8),
    AttentionFormat.INT8: _FP8,
    AttentionFormat.MXFP6: (*_FP8, AttentionFormat.MXFP4),
    AttentionFormat.MXFP4: (AttentionFormat.MXFP4,),
    **{native: (native, AttentionFormat.MXFP6) for native in _FP8},
}


@contextmanager
def aiter_quant_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the module in place."""
    kernel = MhaV4StandIn(log)
    symbols = {name: getattr(kernel, name) for name in ("mha_v4", "mha_v4_mxfp8", "native_fp8_format")}
    with fake_package(MODULE, AttentionFormat=AttentionFormat, **symbols):
        yield


class MhaV4StandIn:
    """mha_v4 and mha_v4_mxfp8: contiguous [B, S, H, 128], one dtype, a group of 1, 2, 4, 8 or 16 query heads."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def native_fp8_format(self) -> AttentionFormat:
        """What a gfx950 answers."""
        return AttentionFormat.FP8_E4M3

    def mha_v4(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_format: AttentionFormat,
        k_format: AttentionFormat,
        v_format: AttentionFormat,
        softmax_scale: float | None = None,
    ) -> torch.Tensor:
        """Output [B, Sq, H, 128]."""
        assert q_format == k_format and v_format in _VALUES[q_format], "no such recipe"
        return self._attend(f"mha_v4 {q_format.name} {v_format.name}", q, k, v, softmax_scale)

    def mha_v4_mxfp8(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None
    ) -> torch.Tensor:
        """Output [B, Sq, H, 128]."""
        return self._attend("mha_v4_mxfp8", q, k, v, softmax_scale)

    def _attend(
        self, call: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        self.log.calls.append(call)
        for tensor in (q, k, v):
            assert tensor.dim() == 4 and tensor.shape[-1] == 128 and tensor.is_contiguous()
        assert q.dtype == k.dtype == v.dtype and k.shape == v.shape
        assert q.shape[2] / k.shape[2] in (1, 2, 4, 8, 16)
        return reference_attention(q, k, v, softmax_scale=scale)[0].to(q.dtype)
