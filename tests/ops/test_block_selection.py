"""Selections as maps and as numbers of token pairs."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.selection import BlockSelection, block_map, token_pairs
from omni_attn.ops.block_sparse.selectors import mean_topk
from omni_attn.ops.video_tiles import video_tiles

CPU = torch.device("cpu")


def test_a_map_reads_only_what_counts() -> None:
    indices = torch.tensor([[[[0, 3, -1], [2, 99, 2**31 - 1], [1, 2, 3]]]], dtype=torch.int32)
    counts = torch.tensor([[[2, 0, 3]]], dtype=torch.int32)
    found = block_map(SelectedBlocks(indices, counts), 4)
    assert found.int().tolist() == [[[[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1]]]]


@settings(deadline=None, max_examples=25)
@given(
    grid=st.tuples(*[st.integers(1, 7)] * 3),
    tile=st.tuples(*[st.integers(1, 4)] * 3),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_pairs_of_ragged_grids(
    grid: tuple[int, int, int], tile: tuple[int, int, int], seed: int, data: st.DataObject
) -> None:
    tiles = video_tiles(grid, tile, CPU)
    topk = data.draw(st.integers(1, tiles.num_blocks))
    scores = torch.randn(
        2, 3, tiles.num_blocks, tiles.num_blocks, generator=torch.Generator().manual_seed(seed)
    )
    selected = mean_topk(scores, topk)
    by_token = tiles.block_of
    chosen = block_map(selected, tiles.num_blocks)[:, :, by_token][..., by_token]  # token by token
    found = token_pairs(BlockSelection(selected, tiles, tiles))
    assert found.dtype == torch.int64
    assert torch.equal(found, chosen.sum((-1, -2)))


def test_queries_and_keys_may_be_cut_differently() -> None:
    queries, keys = BlockPartition.in_order(7, 3, CPU), BlockPartition.in_order(10, 4, CPU)  # 3 3 1 and 4 4 2
    indices = torch.tensor([[[[2, 0], [0, 1], [1, 2]]]], dtype=torch.int32)
    counts = torch.tensor([[[1, 2, 2]]], dtype=torch.int32)
    found = token_pairs(BlockSelection(SelectedBlocks(indices, counts), queries, keys))
    assert found.tolist() == [[3 * 2 + 3 * 8 + 1 * 6]]
