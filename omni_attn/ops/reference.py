"""REF: softmax attention in float64, slow and exact. What every backend is judged against."""

from __future__ import annotations

import torch

from omni_attn.ops.masks import position_mask


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64: (output [B, Sq, H, Dv], lse [B, H, Sq]), both float64.

    Args:
        query: [B, Sq, H, D]; key: [B, Sk, G, D]; value: [B, Sk, G, Dv] with H a multiple of G; key head j serves
            query heads j * H/G to (j + 1) * H/G - 1.
        softmax_scale: default D ** -0.5.
        attn_mask: [B, Sk] or broadcastable to [B, H, Sq, Sk]; bool = keep, float = added.
        causal, window: aligned at the bottom right, see `position_mask`.

    A row without a key gives zeros, and -inf in lse.
    """
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    groups = query.shape[2] // key.shape[2]
    key, value = (x.double().repeat_interleave(groups, dim=2).transpose(1, 2) for x in (key, value))
    scores = query.double().transpose(1, 2) @ key.transpose(-1, -2) * scale
    if attn_mask is not None:
        mask = attn_mask[:, None, None] if attn_mask.dim() == 2 else attn_mask
        scores = (
            scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.double()
        )
    if causal or window is not None:
        keep = position_mask(*scores.shape[-2:], causal=causal, window=window, device=scores.device)
        scores = scores.masked_fill(~keep, float("-inf"))
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores, dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), lse
