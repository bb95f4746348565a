"""rf_softmax_threshold: RainFusion's choice of key blocks (rf_v2 of MindIE-SD)."""

from __future__ import annotations

import torch

from omni_attn.ops.block_sparse.block_map import blocks_of_map, rankable
from omni_attn.ops.block_sparse.executor import SelectedBlocks


def rf_softmax_threshold(
    scores: torch.Tensor, keep: int, protected: torch.Tensor | None = None
) -> SelectedBlocks:
    """All blocks of a row whose softmax weight reaches the row's `keep`-th largest, and the protected ones.

    Blocks that equal the threshold are kept all, so rows hold `keep` blocks or more. Protected blocks take part in
    the ranking: they use up the budget where they rank high, and come on top of it where they do not. As query blocks
    they see every block. A row with a NaN or an infinity keeps its first `keep` blocks.

    The softmax itself is left out: it keeps the order, and its rounding and underflow would only make equals of
    blocks that are none.

    Args:
        scores: [B, H, blocks, blocks] between block means.
        keep: 1 to the number of blocks.
        protected: bool [blocks], None = no block is.
    """
    finite = scores.detach().isfinite().all(-1, keepdim=True)
    ranked = rankable(scores)
    threshold = ranked.topk(keep, dim=-1).values[..., -1:]
    first = torch.arange(scores.shape[-1], device=scores.device) < keep
    kept = torch.where(finite, ranked >= threshold, first)
    if protected is not None:
        kept = kept | protected | protected[:, None]
    return blocks_of_map(kept)
