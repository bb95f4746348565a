"""Attention over the shards of a ring, put together one part after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_attn.ops.merge_state import merge_attn_states

Part = tuple[Tensor, Tensor]
"""Output [B, S, H, D] of attention over some of the keys, and its log-sum-exp [B, H, S] in float32."""


def merge_part(merged: Part | None, part: Part, *, is_last: bool) -> Part:
    """The parts so far with one more: in float32, and rounded to the part's dtype once, with the last.

    Args:
        merged: parts so far, None = none; its output may be written over.
        part: as a kernel gives it.
    """
    if merged is None:
        return part
    output, lse = part
    dtype = output.dtype if is_last else torch.float32
    reuse = (
        merged[0].dtype == dtype != output.dtype and not merged[0].requires_grad and not output.requires_grad
    )
    target = merged[0] if reuse else torch.empty_like(output, dtype=dtype)
    batch, tokens, heads, _ = output.shape
    _, whole = merge_attn_states(
        merged[0].flatten(0, 1),
        _by_head(merged[1]),
        output.flatten(0, 1),
        _by_head(lse),
        target.flatten(0, 1),
    )
    return target, whole.view(heads, batch, tokens).transpose(0, 1)


def _by_head(lse_BHS: Tensor) -> Tensor:
    """[H, B * S], the order of the outputs' rows: a view for a batch of one."""
    return lse_BHS.transpose(0, 1).flatten(1)
