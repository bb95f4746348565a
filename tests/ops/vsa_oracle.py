"""Block-sparse and video sparse attention from their formulas: float64, one token at a time, nothing shared with ours.

Dimensions: B batch, S sequence, H heads, G key heads, D head size, N blocks.
Blocks are lists of token numbers; a selection is a list of key blocks for each batch, head and query block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Extent = tuple[int, int, int]
Blocks = Sequence[Sequence[int]]
Selection = Sequence[Sequence[Sequence[Sequence[int]]]]


def tiles_of(grid: Extent, tile: Extent) -> list[list[int]]:
    """Tokens of each tile: a token belongs to the tile that its coordinates, divided by the tile's, name."""
    tiles: dict[Extent, list[int]] = {}
    for t in range(grid[0]):
        for h in range(grid[1]):
            for w in range(grid[2]):
                place = t // tile[0], h // tile[1], w // tile[2]
                tiles.setdefault(place, []).append((t * grid[1] + h) * grid[2] + w)
    return [tiles[place] for place in sorted(tiles)]


def budget(sparsity: float, blocks: int) -> int:
    """Key blocks kept of each row, in Python's own floats."""
    return max(1, min(blocks, math.ceil((1 - sparsity) * blocks)))


def highest(scores: Sequence[float], count: int) -> list[int]:
    """The `count` highest, among equals the first, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda block: -scores[block])[:count])


def softmax_over(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sum of values [N, D], weighted by the softmax of scores [N]."""
    weights = (scores - scores.max()).exp()
    return (weights[:, None] * values).sum(0) / weights.sum()


def means_of(tensor_BSHD: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """float64 [B, H, N, D]."""
    rows = [tensor_BSHD[:, list(block)].double().sum(1) / len(block) for block in blocks]
    return torch.stack(rows, dim=2)


def scores_of(
    query: torch.Tensor, key: torch.Tensor, query_blocks: Blocks, key_blocks: Blocks, scale: float
) -> torch.Tensor:
    """Scaled products of block means, float64 [B, H, query blocks, key blocks]."""
    query_means, key_means = means_of(query, query_blocks), means_of(key, key_blocks)
    share = query.shape[2] // key.shape[2]
    scores = query_means.new_empty(query.shape[0], query.shape[2], len(query_blocks), len(key_blocks))
    for b in range(query.shape[0]):
        for h in range(query.shape[2]):
            for i in range(len(query_blocks)):
                for j in range(len(key_blocks)):
                    scores[b, h, i, j] = scale * (query_means[b, h, i] * key_means[b, h // share, j]).sum()
    return scores


def coarse_of(scores: torch.Tensor, value: torch.Tensor, key_blocks: Blocks) -> torch.Tensor:
    """Attention between blocks, each with the same weight, float64 [B, H, query blocks, Dv]."""
    means = means_of(value, key_blocks)
    batch, heads, rows, _ = scores.shape
    share = heads // value.shape[2]
    output = means.new_empty(batch, heads, rows, value.shape[-1])
    for b in range(batch):
        for h in range(heads):
            for i in range(rows):
                output[b, h, i] = softmax_over(scores[b, h, i], means[b, h // share])
    return output


def selection_of(scores: torch.Tensor, count: int) -> list[list[list[list[int]]]]:
    """The highest scores of each row."""
    return [[[highest(row, count) for row in head] for head in batch] for batch in scores.tolist()]


def margin_of(scores: torch.Tensor, count: int) -> float:
    """How far apart the last selected and the first unselected score are, in the row where that is least."""
    if count == scores.shape[-1]:
        return math.inf
    ordered = scores.sort(descending=True).values
    return float((ordered[..., count - 1] - ordered[..., count]).min())


def fine_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_blocks: Blocks,
    key_blocks: Blocks,
    selection: Selection,
    scale: float,
) -> torch.Tensor:
    """Attention of each token over the tokens of the selected blocks, float64 [B, Sq, H, Dv]; zeros without any."""
    query, key, value = (x.detach().cpu().double() for x in (query, key, value))
    batch, tokens, heads, _ = query.shape
    share = heads // key.shape[2]
    output = query.new_zeros(batch, tokens, heads, value.shape[-1])
    for b in range(batch):
        for h in range(heads):
            for i, block in enumerate(query_blocks):
                seen = [y for j in selection[b][h][i] for y in key_blocks[j]]
                if not seen:
                    continue
                keys, values = key[b, seen, h // share], value[b, seen, h // share]
                for x in block:
                    output[b, x, h] = softmax_over(scale * (keys * query[b, x, h]).sum(-1), values)
    return output


def broadcast(coarse: torch.Tensor, blocks: Blocks, gate: torch.Tensor | None) -> torch.Tensor:
    """Each token's share of its block's coarse output, times its gate: [B, S, H, Dv]."""
    batch, heads, _, size = coarse.shape
    output = coarse.new_zeros(batch, sum(map(len, blocks)), heads, size)
    for i, block in enumerate(blocks):
        for x in block:
            output[:, x] = coarse[:, :, i] * (1.0 if gate is None else gate[:, x].cpu().double())
    return output


def vsa_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    topk: int,
    scale: float,
    *,
    gate: torch.Tensor | None = None,
    coarse: bool = False,
) -> torch.Tensor:
    """Video sparse attention, float64 [B, S, H, Dv]; without a gate the coarse part counts only if asked for."""
    query, key, value = (x.detach().cpu().double() for x in (query, key, value))
    scores = scores_of(query, key, blocks, blocks, scale)
    output = fine_of(query, key, value, blocks, blocks, selection_of(scores, topk), scale)
    if gate is not None or coarse:
        output = output + broadcast(coarse_of(scores, value, blocks), blocks, gate)
    return output
