"""VSA-H3 from the words of its definition: float64, block by block and token by token, nothing shared with ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.ops.vsa_oracle import (
    Extent,
    Selection,
    broadcast,
    coarse_of,
    fine_of,
    highest,
    margin_of,
    scores_of,
    tiles_of,
)


def blocks_of(segments: Sequence[int], grid: Extent, tile: Extent) -> tuple[list[list[int]], int]:
    """The tokens of each block, chunks of the segments first, and how many chunks there are."""
    whole = tile[0] * tile[1] * tile[2]
    chunks: list[list[int]] = []
    token = 0
    for segment in segments:
        for place in range(segment):
            if place % whole == 0:
                chunks.append([])
            chunks[-1].append(token)
            token += 1
    return [*chunks, *([token + t for t in tokens] for tokens in tiles_of(grid, tile))], len(chunks)


def selection_of(scores: torch.Tensor, prefix: int, kept: int, *, compete: bool) -> Selection:
    """Key blocks of each row, from scores [B, H, N, N] whose first `prefix` blocks lie before the video."""
    blocks = scores.shape[-1]

    def of_row(number: int, row: list[float]) -> list[int]:
        if number < prefix or kept >= blocks - prefix:
            return list(range(blocks))
        if compete:
            return highest(row, kept + prefix)
        return [*range(prefix), *(prefix + best for best in highest(row[prefix:], kept))]

    return [[[of_row(n, row) for n, row in enumerate(head)] for head in item] for item in scores.tolist()]


def margin(scores: torch.Tensor, prefix: int, kept: int, *, compete: bool) -> float:
    """How clear the choices of the video's rows are; see margin_of."""
    rows = scores[:, :, prefix:]
    return margin_of(rows, prefix + kept) if compete else margin_of(rows[..., prefix:], kept)


def vsa_h3_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[int],
    grid: Extent,
    tile: Extent,
    kept: int,
    scale: float,
    *,
    gate: torch.Tensor | None = None,
    coarse: bool = False,
    compete: bool = False,
) -> torch.Tensor:
    """float64 [B, S, H, Dv], of the tokens in use."""
    query, key, value = (x.detach().cpu().double() for x in (query, key, value))
    blocks, prefix = blocks_of(segments, grid, tile)
    scores = scores_of(query, key, blocks, blocks, scale)
    selection = selection_of(scores, prefix, kept, compete=compete)
    output = fine_of(query, key, value, blocks, blocks, selection, scale)
    if gate is None and not coarse:
        return output
    return output + broadcast(coarse_of(scores, value, blocks), blocks, gate)
