"""Tiles of a video's token grid, against coordinates, worked examples and the sizes of known models."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from omni_attn.ops.block_sparse.selectors import blocks_kept
from omni_attn.ops.video_tiles import axis_sizes, partition, tile_count, tile_sizes, video_tiles
from tests.ops.vsa_oracle import Extent, tiles_of

grids = st.tuples(*[st.integers(1, 9)] * 3)
tiles = st.tuples(*[st.integers(1, 11)] * 3)
CPU = torch.device("cpu")


def test_worked_example() -> None:
    order = "0 1 3 4 9 10 12 13  2 5 11 14  6 7 15 16  8 17  18 19 21 22  20 23  24 25  26"
    untile = "0 1 8 2 3 9 16 17 24 4 5 10 6 7 11 18 19 25 32 33 40 34 35 41 48 49 56"
    assert partition((3, 3, 3), (2, 2, 2)).tolist() == [int(token) for token in order.split()]
    assert tile_sizes((3, 3, 3), (2, 2, 2)) == [8, 4, 4, 2, 4, 2, 2, 1]
    blocks = video_tiles((3, 3, 3), (2, 2, 2), CPU)
    assert blocks.slots().tolist() == [int(slot) for slot in untile.split()]


@pytest.mark.parametrize(
    ("length", "tile", "sizes"),
    [(1, 4, [1]), (4, 4, [4]), (5, 4, [4, 1]), (7, 4, [4, 3]), (8, 4, [4, 4]), (3, 1, [1, 1, 1])],
)
def test_the_last_tile_of_an_axis_is_clipped(length: int, tile: int, sizes: list[int]) -> None:
    assert axis_sizes(length, tile) == sizes


def test_a_tile_beyond_the_grid_takes_no_room_that_is_never_filled() -> None:
    assert video_tiles((3, 5, 6), (4, 4, 4), CPU).capacity == 3 * 4 * 4
    one = video_tiles((3, 5, 6), (10**12, 10**12, 10**12), CPU)
    assert (one.capacity, one.sizes) == (90, (90,))


# grid, tokens, tile, tiles, padded length, partial tiles, smallest tile, tiles kept at sparsity 0.8 and 0.9
MODELS = [
    ((21, 30, 52), 32760, (4, 4, 4), (6, 8, 13), 39936, 169, 8, 125, 63),
    ((21, 30, 52), 32760, (4, 8, 8), (6, 4, 7), 43008, 78, 24, 34, 17),
    ((21, 45, 80), 75600, (4, 4, 4), (6, 12, 20), 92160, 340, 4, 288, 144),
    ((21, 45, 80), 75600, (4, 8, 8), (6, 6, 10), 92160, 110, 40, 72, 36),
    ((16, 28, 52), 23296, (4, 4, 4), (4, 7, 13), 23296, 0, 64, 73, 37),
    ((20, 28, 52), 29120, (4, 4, 4), (5, 7, 13), 29120, 0, 64, 91, 46),
    ((31, 22, 40), 27280, (4, 4, 4), (8, 6, 10), 30720, 130, 24, 96, 48),
    ((31, 22, 40), 27280, (4, 8, 8), (8, 3, 5), 30720, 50, 144, 24, 12),
    ((37, 24, 42), 37296, (4, 4, 4), (10, 6, 11), 42240, 120, 8, 132, 66),
]


@pytest.mark.parametrize(
    ("grid", "tokens", "tile", "counts", "padded", "partial", "least", "at_08", "at_09"),
    MODELS,
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_sizes_of_known_models(
    grid: Extent,
    tokens: int,
    tile: Extent,
    counts: Extent,
    padded: int,
    partial: int,
    least: int,
    at_08: int,
    at_09: int,
) -> None:
    sizes = tile_sizes(grid, tile)
    capacity = tile[0] * tile[1] * tile[2]
    assert tuple(len(axis_sizes(*axis)) for axis in zip(grid, tile, strict=True)) == counts
    assert tile_count(grid, tile) == len(sizes) == counts[0] * counts[1] * counts[2]
    assert sum(sizes) == tokens and len(sizes) * capacity == padded
    assert sum(size < capacity for size in sizes) == partial and min(sizes) == least
    assert (blocks_kept(0.8, len(sizes)), blocks_kept(0.9, len(sizes))) == (at_08, at_09)
    blocks = video_tiles(grid, tile, CPU)
    assert (blocks.tokens, blocks.capacity, blocks.sizes) == (tokens, capacity, tuple(sizes))
    assert blocks.order.sort().values.equal(torch.arange(tokens, dtype=torch.int32))


@given(grids, tiles)
@example((1, 1, 1), (4, 4, 4))  # smaller than a tile on every axis
@example((5, 5, 5), (4, 4, 4))  # edge tiles of size 1
@example((9, 1, 2), (1, 11, 1))
def test_tiles_hold_the_tokens_that_their_coordinates_name(grid: Extent, tile: Extent) -> None:
    expected = tiles_of(grid, tile)
    assert partition(grid, tile).tolist() == [token for tokens in expected for token in tokens]
    assert partition(grid, tile).dtype == torch.int64
    assert tile_sizes(grid, tile) == [len(tokens) for tokens in expected]
    assert tile_count(grid, tile) == len(expected)


@given(grids, tiles)
@example((2, 2, 2), (4, 4, 4))
@example((5, 6, 7), (4, 4, 4))
def test_a_grids_partition_agrees_with_itself(grid: Extent, tile: Extent) -> None:
    blocks, expected = video_tiles(grid, tile, CPU), tiles_of(grid, tile)
    assert blocks.num_blocks == len(expected) and blocks.tokens == grid[0] * grid[1] * grid[2]
    assert blocks.capacity == max(map(len, expected))  # of a tile beyond the grid, what lies inside
    assert blocks.order.dtype == blocks.offsets.dtype == blocks.block_sizes.dtype == torch.int32
    order, offsets = blocks.order.tolist(), blocks.offsets.tolist()
    assert [order[a:b] for a, b in pairwise(offsets)] == expected
    assert blocks.block_sizes.tolist() == list(blocks.sizes)
    for block, tokens in enumerate(expected):
        assert {int(blocks.block_of[token]) for token in tokens} == {block}


def test_a_grids_partition_is_made_once() -> None:
    assert video_tiles((5, 6, 7), (4, 4, 4), CPU) is video_tiles((5, 6, 7), (4, 4, 4), CPU)
