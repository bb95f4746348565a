"""What selectors share: maps of kept blocks as index lists, all blocks, and rows that cannot be ranked."""

from __future__ import annotations

import torch

from omni_attn.ops.block_sparse.executor import SelectedBlocks


def blocks_of_map(keep: torch.Tensor) -> SelectedBlocks:
    """The True entries of a bool map [B, H, query blocks, key blocks], ascending; the places behind them hold -1."""
    kept_before = keep.cumsum(-1)
    counts = kept_before[..., -1:]
    # Kept blocks go to the front in their order, the others behind them: each block has a place of its own.
    places = torch.where(keep, kept_before - 1, counts + (~keep).cumsum(-1) - 1)
    blocks = torch.arange(keep.shape[-1], dtype=torch.int32, device=keep.device).where(keep, -1)
    indices = torch.empty_like(blocks).scatter_(-1, places, blocks)
    return SelectedBlocks(indices, counts[..., 0].to(torch.int32))


def all_blocks(shape: tuple[int, int, int, int], device: torch.device) -> SelectedBlocks:
    """Every key block in every row of a map [B, H, query blocks, key blocks]."""
    blocks = torch.arange(shape[-1], dtype=torch.int32, device=device)
    counts = torch.full(shape[:-1], shape[-1], dtype=torch.int32, device=device)
    return SelectedBlocks(blocks.expand(shape).contiguous(), counts)


def rankable(scores: torch.Tensor) -> torch.Tensor:
    """The scores [..., key blocks], with all equal in a row that holds a NaN or an infinity.

    No order of such a row is the right one; where equals are taken from the lowest index on, it takes its first blocks,
    and exactly as many as any other row.
    """
    scores = scores.detach()
    return scores.where(scores.isfinite().all(-1, keepdim=True), 0.0).contiguous()
