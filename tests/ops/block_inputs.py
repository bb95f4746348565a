"""Deterministic float64 inputs of the published numbers, and a plain view of selected blocks."""

from __future__ import annotations

import torch

from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.means import block_means, coarse_scores
from omni_attn.ops.block_sparse.partition import BlockPartition

HEADS, SIZE = 2, 8
SCALE = SIZE**-0.5


def waves(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [1, S, 2, 8] in float64: sines of the token, head and channel numbers."""
    s = torch.arange(tokens, dtype=torch.float64)[None, :, None, None]
    n = torch.arange(HEADS, dtype=torch.float64)[None, None, :, None]
    d = torch.arange(SIZE, dtype=torch.float64)[None, None, None, :]
    query = 2 * torch.sin(0.37 * s + 0.5 * n + 0.9 * d)
    key = 2 * torch.sin(0.23 * s + 0.7 * n + 0.6 * d + 0.3)
    return query, key, torch.sin(0.11 * s + 0.2 * n + 0.4 * d + 0.7)


def scores_between(query: torch.Tensor, key: torch.Tensor, blocks: BlockPartition) -> torch.Tensor:
    """Scaled scores between block means, [B, H, blocks, blocks]."""
    return coarse_scores(block_means(query, blocks), block_means(key, blocks), query.shape[-1] ** -0.5)


def as_lists(selected: SelectedBlocks, head: int = 0, item: int = 0) -> list[list[int]]:
    """Each row's blocks, after checking what the contract says of the lists."""
    indices, counts = selected
    assert indices.dtype == counts.dtype == torch.int32
    assert indices.is_contiguous() and counts.is_contiguous() and indices.shape[:-1] == counts.shape
    rows = []
    for row, count in zip(indices[item, head].tolist(), counts[item, head].tolist(), strict=True):
        kept = row[:count]
        assert kept == sorted(set(kept)) and all(block >= 0 for block in kept)
        assert all(block == -1 for block in row[count:])
        rows.append(kept)
    return rows


def token_mask(selected: SelectedBlocks, blocks: BlockPartition) -> torch.Tensor:
    """bool [B, H, S, S]: which token sees which."""
    indices, counts = selected
    keep = torch.zeros(*counts.shape, blocks.num_blocks, dtype=torch.bool)
    for place in range(indices.shape[-1]):
        chosen = place < counts
        block = indices[..., place].long().where(chosen, 0)[..., None]
        keep |= torch.zeros_like(keep).scatter_(-1, block, chosen[..., None])
    block_of = blocks.block_of
    return keep[:, :, block_of][..., block_of]
