"""A video's token grid (T, H, W) cut into tiles of neighbouring tokens; segments before it into chunks as large."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod

import torch

from omni_attn.ops.block_sparse.kept import keep_captured
from omni_attn.ops.block_sparse.partition import BlockPartition

Extent = tuple[int, int, int]


def extent_of(numbers: Sequence[int]) -> Extent:
    """The extent in a sequence of three numbers, which is what operators hand over."""
    frames, rows, columns = numbers
    return frames, rows, columns


def axis_sizes(length: int, tile: int) -> list[int]:
    """Extents of the tiles along one axis; the last one is clipped."""
    return [min(tile, length - start) for start in range(0, length, tile)]


def tile_sizes(grid: Extent, tile: Extent) -> list[int]:
    """Tokens of each tile, in tile order: frames, rows, columns, the columns fastest."""
    frames, rows, columns = (axis_sizes(*axis) for axis in zip(grid, tile, strict=True))
    return [f * r * c for f in frames for r in rows for c in columns]


def tile_count(grid: Extent, tile: Extent) -> int:
    """Number of tiles of a grid."""
    frames, rows, columns = (-(-length // extent) for length, extent in zip(grid, tile, strict=True))
    return frames * rows * columns


def chunk_sizes(segments: Sequence[int], tile: Extent) -> list[int]:
    """Tokens of each chunk of the segments before a video: as many as a tile has, none across two segments."""
    return [size for segment in segments for size in axis_sizes(segment, prod(tile))]


def partition(grid: Extent, tile: Extent) -> torch.Tensor:
    """int64 [T*H*W]: the tokens, numbered in raster order, tile by tile, and in raster order inside a tile."""
    numbers = torch.arange(grid[0] * grid[1] * grid[2], device="cpu").view(grid)
    cuts = [[*range(0, length, extent), length] for length, extent in zip(grid, tile, strict=True)]
    return torch.cat(
        [
            numbers[t0:t1, h0:h1, w0:w1].flatten()
            for t0, t1 in pairwise(cuts[0])
            for h0, h1 in pairwise(cuts[1])
            for w0, w1 in pairwise(cuts[2])
        ]
    )


def video_tiles(
    grid: Extent, tile: Extent, device: torch.device, segments: tuple[int, ...] = ()
) -> BlockPartition:
    """The chunks of the segments before a video, then the tiles of its grid in raster order, as a partition of the
    tokens on a device; kept for later calls.

    Not for compiled code, where the cache cannot be asked: call it inside an operator.

    Raises:
        MetadataError: the first call for a grid lies inside a CUDA-graph capture.
    """
    tiles = _video_tiles(grid, tile, device, segments)
    keep_captured(tiles, device)
    return tiles


@lru_cache(maxsize=64)
def _video_tiles(
    grid: Extent, tile: Extent, device: torch.device, segments: tuple[int, ...]
) -> BlockPartition:
    chunks, before = chunk_sizes(segments, tile), sum(segments)
    # Of a tile that reaches beyond the grid no more is ever filled, and executors have buffers for whole tiles.
    capacity = max(prod(map(min, grid, tile)), *chunks, 1)
    order = torch.cat([torch.arange(before, device="cpu"), before + partition(grid, tile)])
    with torch.inference_mode(False):  # kept tensors must serve calls with gradients too
        return BlockPartition.of(order, [*chunks, *tile_sizes(grid, tile)], capacity, device)
