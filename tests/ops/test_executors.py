"""The contract of executors: attention of each query block over the key blocks selected for it, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from omni_attn.ops.block_sparse.executor import CoarseTerm, SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.video_tiles import video_tiles
from tests.ops.executors import (
    ExecutorCase,
    Tensors,
    View,
    as_tensors,
    assert_near,
    blocks_of,
    random_examples,
    some_blocks,
    stored_heads_first,
    stored_once,
    stored_with_gaps,
    stored_with_others,
)
from tests.ops.vsa_oracle import Extent, broadcast, fine_of, means_of

GRID, TILE = (3, 5, 6), (2, 4, 4)  # 90 tokens in 8 clipped tiles, the last of 2
SMALL = (2, 5, 6)  # 60 tokens in 4
SCALE = 0.3


def tiles(executor: ExecutorCase, grid: Extent = GRID, tile: Extent = TILE) -> BlockPartition:
    return video_tiles(grid, tile, torch.device(executor.device))


@random_examples
@given(st.data())
def test_any_grid_tile_and_selection(executor: ExecutorCase, data: st.DataObject) -> None:
    draw = data.draw
    grid = draw(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 7)))
    tile = draw(
        st.sampled_from([(4, 4, 4), (2, 4, 8), (2, 2, 2), (3, 3, 3), (1, 6, 7), (4, 8, 8), (5, 1, 3)])
    )
    batch, kv_heads, share = draw(st.sampled_from([(1, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 3)]))
    dtype, seed = draw(st.sampled_from(executor.dtypes)), draw(st.integers(0, 99))
    heads, tokens, blocks = kv_heads * share, grid[0] * grid[1] * grid[2], tiles(executor, grid, tile)
    assume(batch * heads * blocks.num_blocks <= 48)
    most = max(1, 48 // (batch * heads * blocks.num_blocks))
    tensors = executor.tensors(
        dtype,
        tokens,
        tokens,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([5, 16, 24])),
        value_size=draw(st.sampled_from([None, 7, 32])),
        seed=seed,
    )
    selection = some_blocks(batch, heads, blocks.num_blocks, blocks.num_blocks, seed=seed, most=most)
    scale = draw(st.sampled_from([tensors[0].shape[-1] ** -0.5, 0.05, 1.3]))
    output = executor.attend(tensors, blocks, blocks, selection, scale)
    listed = blocks_of(blocks)
    assert output.dtype == dtype and output.is_contiguous()
    assert_near(output, fine_of(*tensors, listed, listed, selection, scale))


@pytest.mark.parametrize("tile", [(4, 4, 4), (2, 8, 8), (4, 8, 8), (5, 6, 7)], ids=str)
def test_tile_volumes_of_public_kernels_and_beyond(executor: ExecutorCase, tile: Extent) -> None:
    """64, 128, 256 and 210 slots, whole tiles beside clipped ones."""
    blocks = tiles(executor, (5, 9, 8), tile)
    tensors = executor.tensors(executor.dtypes[0], 360, 360, heads=1, kv_heads=1)
    selection = some_blocks(1, 1, blocks.num_blocks, blocks.num_blocks, least=1, most=2)
    listed = blocks_of(blocks)
    output = executor.attend(tensors, blocks, blocks, selection, SCALE)
    assert_near(output, fine_of(*tensors, listed, listed, selection, SCALE))


@pytest.mark.parametrize(
    ("size", "value_size"), [(64, 64), (128, 128), (96, 96), (256, 256), (64, 128), (48, 16)]
)
def test_head_sizes(executor: ExecutorCase, size: int, value_size: int) -> None:
    blocks = tiles(executor)
    tensors = executor.tensors(
        executor.dtypes[0], 90, 90, heads=2, kv_heads=1, head_size=size, value_size=value_size
    )
    selection = some_blocks(1, 2, 8, 8, most=3)
    listed = blocks_of(blocks)
    output = executor.attend(tensors, blocks, blocks, selection, size**-0.5)
    assert output.shape == (1, 90, 2, executor.head_size(value_size))
    assert_near(output, fine_of(*tensors, listed, listed, selection, size**-0.5))


@pytest.mark.parametrize("queries_in_tiles", [True, False])
def test_queries_and_keys_of_different_lengths_and_partitions(
    executor: ExecutorCase, queries_in_tiles: bool
) -> None:
    """One side is a video in tiles of 32, the other a text in blocks of 24."""
    video, text = tiles(executor), BlockPartition.in_order(41, 24, executor.device)
    query_blocks, key_blocks = (video, text) if queries_in_tiles else (text, video)
    tensors = executor.tensors(
        executor.dtypes[0], query_blocks.tokens, key_blocks.tokens, batch=2, heads=2, kv_heads=1
    )
    selection = some_blocks(2, 2, query_blocks.num_blocks, key_blocks.num_blocks, least=1, most=4)
    output = executor.attend(tensors, query_blocks, key_blocks, selection, SCALE)
    expected = fine_of(*tensors, blocks_of(query_blocks), blocks_of(key_blocks), selection, SCALE)
    assert_near(output, expected)


def test_blocks_of_any_order(executor: ExecutorCase) -> None:
    """Tokens of a block need not be neighbours, nor in ascending order."""
    order = torch.randperm(50, generator=torch.Generator().manual_seed(5))
    blocks = BlockPartition.of(order, [20, 1, 7, 16, 6], 20, executor.device)
    tensors = executor.tensors(executor.dtypes[0], 50, 50)
    selection = some_blocks(1, 1, 5, 5, least=1, most=3)
    output = executor.attend(tensors, blocks, blocks, selection, SCALE)
    assert_near(output, fine_of(*tensors, blocks_of(blocks), blocks_of(blocks), selection, SCALE))


def test_rows_without_a_block_are_zeros(executor: ExecutorCase) -> None:
    """Some of them here, and then all of them."""
    blocks, listed = tiles(executor), blocks_of(tiles(executor))
    tensors = executor.tensors(executor.dtypes[0], 90, 90, heads=2, kv_heads=2)
    selection = [[[[0, 5], [], [7], [], [1], [2], [], [3]], [[]] * 8]]
    output = executor.attend(tensors, blocks, blocks, selection, SCALE)
    assert_near(output, fine_of(*tensors, listed, listed, selection, SCALE))
    assert not output[:, listed[1] + listed[3] + listed[6], 0].any() and not output[:, :, 1].any()
    assert not executor.attend(tensors, blocks, blocks, [[[[]] * 8] * 2], SCALE).any()


def test_indices_behind_the_counts_are_ignored(executor: ExecutorCase) -> None:
    """Be they the number of a block or of none."""
    blocks = tiles(executor)
    tensors = executor.tensors(executor.dtypes[0], 90, 90, heads=1, kv_heads=1)
    selection = some_blocks(1, 1, 8, 8, most=2)
    plain = executor.attend(tensors, blocks, blocks, selection, SCALE)
    for ignored in (7, 8, 2**31 - 1, -(2**31)):
        output = executor.attend(tensors, blocks, blocks, selection, SCALE, ignored=ignored)
        assert torch.equal(output, plain)


def test_unselected_tokens_do_not_leak(executor: ExecutorCase) -> None:
    """Not even NaN, next to clipped tiles and behind the counts; and a broken query spoils only its own row."""
    blocks, listed = tiles(executor), blocks_of(tiles(executor))
    tensors = executor.tensors(executor.dtypes[0], 90, 90)
    selection = [[[[2, 3], [1], [7], [4, 5], [3, 7], [], [1, 4], [2]]]]
    expected = executor.attend(tensors, blocks, blocks, selection, SCALE)
    query, key, value = (x.clone() for x in tensors)
    for block, bad in ((0, math.nan), (6, math.inf)):
        key[:, listed[block]] = bad
        value[:, listed[block]] = bad
    query[:, listed[3][2]] = math.nan
    output = executor.attend((query, key, value), blocks, blocks, selection, SCALE, ignored=0)
    rows = [token for token in range(90) if token != listed[3][2]]
    assert torch.equal(output[:, rows], expected[:, rows])


def test_broken_values_reach_those_who_select_them(executor: ExecutorCase) -> None:
    """NaN is not swept under the carpet either."""
    blocks, listed = tiles(executor), blocks_of(tiles(executor))
    query, key, value = executor.tensors(executor.dtypes[0], 90, 90)
    value[:, listed[2][0]] = math.nan
    output = executor.attend((query, key, value), blocks, blocks, [[[[2]] + [[1]] * 7]], SCALE)
    assert bool(output[:, listed[0]].isnan().all()) and not output[:, listed[1]].isnan().any()


@pytest.mark.parametrize("stored", [stored_heads_first, stored_with_others, stored_with_gaps, stored_once])
def test_views_are_taken_and_left_alone(executor: ExecutorCase, stored: View) -> None:
    blocks = tiles(executor, SMALL)
    tensors = executor.tensors(executor.dtypes[-1], 60, 60, batch=2, heads=2, kv_heads=1)
    if stored is stored_once:
        tensors = tuple(stored(x).contiguous() for x in tensors)  # type: ignore[assignment]
    gate = torch.randn_like(tensors[0])
    selection = some_blocks(2, 2, 4, 4, most=2)
    coarse = torch.randn(2, 2, 4, gate.shape[-1], device=executor.device)
    plain = executor.attend(tensors, blocks, blocks, selection, SCALE, CoarseTerm(coarse, gate))
    views: Tensors = tuple(stored(x) for x in tensors)  # type: ignore[assignment]
    gates = stored(gate) if stored is not stored_once else gate
    output = executor.attend(views, blocks, blocks, selection, SCALE, CoarseTerm(coarse, gates))
    assert output.is_contiguous() and torch.equal(output, plain)
    for view, before in zip((*views, gates), (*tensors, gate), strict=True):
        assert torch.equal(view, before)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "weight one"])
def test_the_coarse_term_is_added_to_every_token_of_its_block(executor: ExecutorCase, gated: bool) -> None:
    """Also where nothing is selected; in float32, before the output is rounded."""
    blocks, listed = tiles(executor, SMALL), blocks_of(tiles(executor, SMALL))
    for dtype in executor.dtypes:
        tensors = executor.tensors(dtype, 60, 60, batch=2, heads=2, kv_heads=1, value_size=32)
        generator = torch.Generator().manual_seed(8)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        coarse = torch.randn(2, 2, 4, tensors[2].shape[-1], generator=generator).to(executor.device, wide)
        gate = torch.randn(2, 60, 2, coarse.shape[-1], generator=generator).to(executor.device, dtype)
        term = CoarseTerm(coarse, gate if gated else None)
        selection = some_blocks(2, 2, 4, 4, most=2)
        output = executor.attend(tensors, blocks, blocks, selection, SCALE, term)
        expected = fine_of(*tensors, listed, listed, selection, SCALE)
        expected += broadcast(coarse.cpu().double(), listed, term.gate)
        assert output.dtype == dtype and output.is_contiguous()
        assert_near(output, expected)


def test_the_sum_is_rounded_once(executor: ExecutorCase) -> None:
    """Neither part has an equal in half precision; rounded before they meet, they would leave another difference."""
    blocks = BlockPartition.in_order(8, 8, executor.device)
    for dtype in set(executor.dtypes) & {torch.float16, torch.bfloat16}:
        step = torch.finfo(dtype).eps
        query, key, value = executor.tensors(dtype, 8, 8, heads=1, kv_heads=1)
        query.zero_()
        value[:, ::2] = 1.0
        value[:, 1::2] = 1 + step  # its neighbour; the mean lies halfway
        coarse = torch.full((1, 1, 1, value.shape[-1]), -1 - step / 4, device=executor.device)
        term = CoarseTerm(coarse, None)
        output = executor.attend((query, key, value), blocks, blocks, [[[[0]]]], SCALE, term)
        assert torch.equal(output, torch.full_like(output, step / 4))


@pytest.mark.parametrize("logit", [3000.0, -3000.0])
def test_large_logits_neither_overflow_nor_vanish(executor: ExecutorCase, logit: float) -> None:
    """All equal: the mean of the values seen, in every dtype."""
    blocks, listed = tiles(executor, SMALL), blocks_of(tiles(executor, SMALL))
    for dtype in executor.dtypes:
        query, key, value = executor.tensors(dtype, 60, 60)
        query.fill_(math.copysign(1.0, logit))
        key.fill_(1.0)
        selection = some_blocks(1, 1, 4, 4, least=1, most=3)
        output = executor.attend((query, key, value), blocks, blocks, selection, 3000.0 / query.shape[-1])
        expected = fine_of(0 * query, key, value, listed, listed, selection, 1.0)
        assert_near(output, expected)


def test_one_key_may_outweigh_all_others(executor: ExecutorCase) -> None:
    """The largest logit comes in the last of the selected blocks: sums of the earlier ones must fade away."""
    blocks, listed = tiles(executor), blocks_of(tiles(executor))
    query, key, value = executor.tensors(executor.dtypes[0], 90, 90)
    query.fill_(1.0)
    key.fill_(0.0)
    key[:, listed[7][1]] = 50.0
    output = executor.attend((query, key, value), blocks, blocks, [[[[0, 4, 7]] * 8]], 1.0)
    assert_near(output, value[:, listed[7][1]][:, None].cpu().double().expand(1, 90, 1, -1))


def test_means_come_with_packing(executor: ExecutorCase) -> None:
    video, text = tiles(executor), BlockPartition.in_order(41, 24, executor.device)
    for dtype in executor.dtypes:
        tensors = executor.tensors(dtype, 90, 41, batch=2, heads=4, kv_heads=2, value_size=32)
        packed = executor.make().pack(*tensors, video, text)
        assert packed.query_blocks is video and packed.key_blocks is text
        for mean, tensor, blocks in zip(packed.means, tensors, (video, text, text), strict=True):
            assert mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            expected = means_of(tensor.cpu(), blocks_of(blocks))
            assert_near(mean, expected)


def test_a_packed_call_can_be_attended_twice(executor: ExecutorCase) -> None:
    """Another call in between does not disturb it, and its output is the caller's to keep."""
    blocks, ours = tiles(executor, SMALL), executor.make()
    first, second = (executor.tensors(executor.dtypes[0], 60, 60, seed=seed) for seed in (1, 2))
    selected = as_tensors(some_blocks(1, 1, 4, 4, most=3), 4, executor.device)
    packed = ours.pack(*first, blocks, blocks)
    output = ours.attend(packed, selected, SCALE)
    kept = output.clone()
    ours.attend(ours.pack(*second, blocks, blocks), selected, SCALE)
    assert torch.equal(output, kept) and torch.equal(ours.attend(packed, selected, SCALE), kept)


def test_indices_may_be_a_view(executor: ExecutorCase) -> None:
    """Narrowed to fewer places than they were made with, and counts of one head for all."""
    blocks, ours = tiles(executor), executor.make()
    tensors = executor.tensors(executor.dtypes[0], 90, 90, heads=2, kv_heads=2)
    wide = as_tensors([some_blocks(1, 1, 8, 8, least=2, most=2)[0] * 2], 8, executor.device)
    view = SelectedBlocks(wide.indices[..., :2], wide.counts[:, :1].expand(1, 2, 8))
    packed = ours.pack(*tensors, blocks, blocks)
    assert torch.equal(ours.attend(packed, view, SCALE), ours.attend(packed, wide, SCALE))


def test_permuted_batch_and_heads_permute_the_output(executor: ExecutorCase) -> None:
    blocks = tiles(executor, SMALL)
    query, key, value = executor.tensors(executor.dtypes[0], 60, 60, batch=2, heads=2, kv_heads=2)
    selection = some_blocks(2, 2, 4, 4, most=2)
    plain = executor.attend((query, key, value), blocks, blocks, selection, SCALE)
    swapped = [list(reversed(heads)) for heads in reversed(selection)]
    flipped = tuple(x.flip(0, 2) for x in (query, key, value))
    output = executor.attend(flipped, blocks, blocks, swapped, SCALE)  # type: ignore[arg-type]
    assert torch.equal(output, plain.flip(0, 2))


def test_an_empty_batch(executor: ExecutorCase) -> None:
    blocks, ours = tiles(executor, SMALL), executor.make()
    query, key, value = executor.tensors(executor.dtypes[0], 60, 60, value_size=32)
    selected = as_tensors(some_blocks(1, 1, 4, 4, least=1), 4, executor.device)
    packed = ours.pack(query[:0], key[:0], value[:0], blocks, blocks)
    output = ours.attend(packed, SelectedBlocks(*(x[:0] for x in selected)), SCALE)
    assert output.shape == (0, 60, 1, value.shape[-1])
