"""A stand-in for MindIE-SD."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from omni_attn.ops.reference import reference_attention
from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.log import CallLog


@contextmanager
def mindie_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the module in place."""
    with fake_package("mindiesd", attention_forward=MindieStandIn(log).attention_forward):
        yield


class MindieStandIn:
    """attention_forward of MindIE-SD: masks True = keep, whole matrices; equal heads; no causal, no log-sum-exp.

    Without a named operator it would time candidates. A row without a key holds NaN here.
    """

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def attention_forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
        fused: bool = True,
        head_first: bool = False,
        **kwargs: object,
    ) -> torch.Tensor:
        """Output in the layout of the inputs: [B, H, Sq, D] with head_first, else [B, Sq, H, D]."""
        self.log.calls.append("attention_forward")
        assert fused and (kwargs["opt_mode"], kwargs["op_type"]) == ("manual", "fused_attn_score")
        assert kwargs["layout"] in ("BNSD", "BSND", "BSH") and kwargs["use_env_override"] is False
        assert scale is None or isinstance(scale, float)
        if head_first:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        assert query.dim() == 4 and key.shape == value.shape and query.shape[2] == key.shape[2]
        assert query.dtype == key.dtype == value.dtype
        if attn_mask is not None:
            lengths = (query.shape[1], key.shape[1])
            assert attn_mask.dtype == torch.bool and attn_mask.is_contiguous()
            assert attn_mask.dim() == 4 and attn_mask.shape[2:] == lengths, "needs a whole matrix"
            assert attn_mask.shape[0] in (1, query.shape[0]) and attn_mask.shape[1] in (1, query.shape[2])
        output, lse = reference_attention(query, key, value, softmax_scale=scale, attn_mask=attn_mask)
        output = output.to(query.dtype).masked_fill(
            (lse == float("-inf")).transpose(1, 2)[..., None], float("nan")
        )
        return output.transpose(1, 2) if head_first else output
