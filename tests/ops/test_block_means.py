"""Block means and the coarse attention between them, against the formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_attn.ops.block_sparse.means import block_means, coarse_attention, coarse_scores
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.video_tiles import video_tiles
from tests.gpu.machine import on_gpu
from tests.ops.executors import (
    CoarseStage,
    View,
    assert_near,
    random_examples,
    stored_heads_first,
    stored_with_gaps,
    stored_with_others,
)
from tests.ops.vsa_oracle import Extent, coarse_of, means_of, scores_of, tiles_of

GRID, TILE = (3, 5, 4), (2, 2, 4)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@random_examples
@given(st.tuples(*[st.integers(1, 5)] * 3), st.tuples(*[st.integers(1, 5)] * 3), st.integers(0, 99))
def test_means_divide_by_the_tokens_that_are_there(
    stage: CoarseStage, grid: Extent, tile: Extent, seed: int
) -> None:
    for dtype in stage.dtypes:
        tensor = randn(2, grid[0] * grid[1] * grid[2], 2, 5, seed=seed).to(stage.device, dtype)
        means = stage.means(tensor, video_tiles(grid, tile, torch.device(stage.device)))
        assert means.dtype == dtype
        assert_near(means, means_of(tensor.cpu(), tiles_of(grid, tile)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_means_are_float32_and_as_exact(stage: CoarseStage, dtype: torch.dtype) -> None:
    tensor = randn(1, 60, 2, 8).to(stage.device, dtype)
    means = stage.means(tensor, video_tiles(GRID, TILE, torch.device(stage.device)))
    assert means.dtype == torch.float32
    expected = means_of(tensor.cpu(), tiles_of(GRID, TILE))
    torch.testing.assert_close(means.cpu().double(), expected, rtol=1e-6, atol=1e-6)


def test_sums_beyond_the_inputs_range_are_exact(stage: CoarseStage) -> None:
    """60000 is near the largest float16: two of them already overflow in it."""
    large = torch.full((1, 64, 1, 2), 60000.0, dtype=torch.float16, device=stage.device)
    means = stage.means(large, BlockPartition.in_order(64, 64, stage.device))
    assert means.flatten().tolist() == [60000.0] * 2


def test_a_broken_token_spoils_only_its_own_block(stage: CoarseStage) -> None:
    tensor, tiles = randn(1, 60, 2, 4).to(stage.device, torch.float32), tiles_of(GRID, TILE)
    expected = means_of(tensor.cpu(), tiles)
    tensor[0, tiles[3][0]] = float("nan")
    means = stage.means(tensor, video_tiles(GRID, TILE, torch.device(stage.device)))
    assert bool(means[:, :, 3].isnan().all())
    others = [block for block in range(len(tiles)) if block != 3]
    assert_near(means[:, :, others], expected[:, :, others])


@pytest.mark.parametrize("stored", [stored_heads_first, stored_with_others, stored_with_gaps])
def test_every_input_may_be_a_view(stage: CoarseStage, stored: View) -> None:
    blocks = video_tiles(GRID, TILE, torch.device(stage.device))
    tensor = randn(2, 60, 2, 16).to(stage.device, torch.float32)
    means = stage.means(tensor, blocks)
    assert torch.equal(stage.means(stored(tensor), blocks), means)
    scores = stage.scores(means, means.flip(1), 0.3)
    assert torch.equal(stage.scores(stored(means), stored(means.flip(1)), 0.3), scores)
    output = stage.attention(scores, means, torch.float32)
    assert torch.equal(stage.attention(stored(scores), stored(means), torch.float32), output)
    assert torch.equal(stage.select(stored(scores), 3).indices, stage.select(scores, 3).indices)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_scores_and_coarse_output(stage: CoarseStage, heads: int, kv_heads: int) -> None:
    blocks, tiles = video_tiles(GRID, TILE, torch.device(stage.device)), tiles_of(GRID, TILE)
    for dtype in stage.dtypes:
        query, key = (randn(2, 60, n, 16).to(stage.device, dtype) for n in (heads, kv_heads))
        value = randn(2, 60, kv_heads, 48, seed=1).to(stage.device, dtype)
        scores = stage.scores(block_means(query, blocks), block_means(key, blocks), 0.7)
        expected = scores_of(query.cpu(), key.cpu(), tiles, tiles, 0.7)
        assert scores.dtype == dtype and scores.is_contiguous()
        assert_near(scores, expected)
        output = stage.attention(scores, block_means(value, blocks), dtype)
        assert_near(output, coarse_of(expected, value.cpu(), tiles))


def test_many_blocks(stage: CoarseStage) -> None:
    """More blocks than one step of a kernel takes, and different numbers of query and key blocks."""
    query, key, value = (randn(1, 2, n, 16, seed=n).to(stage.device, torch.float32) for n in (150, 200, 200))
    scores = stage.scores(query, key, 0.25)
    expected = 0.25 * query.cpu().double() @ key.cpu().double().transpose(-1, -2)
    assert_near(scores, expected)
    assert_near(stage.attention(scores, value, torch.float32), expected.softmax(-1) @ value.cpu().double())


def test_scores_have_float32_accuracy(stage: CoarseStage) -> None:
    """Blocks that differ by 1e-5 in a score of 64 are told apart; tf32 or bfloat16 products would not."""
    query = torch.ones(1, 1, 1, 64, device=stage.device)
    key = torch.ones(1, 1, 3, 64, device=stage.device)
    key[..., 1, 0] += 2.0**-12
    assert stage.scores(query, key, 1.0).flatten().tolist() == [64.0, 64.0 + 2.0**-12, 64.0]


def test_a_small_block_weighs_as_much_as_a_whole_one(stage: CoarseStage) -> None:
    """Equal scores average the blocks' means, not the tokens."""
    blocks = BlockPartition.of(torch.arange(5), [4, 1], 4, stage.device)
    value = torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0], device=stage.device).view(1, 5, 1, 1).repeat(1, 1, 1, 16)
    scores = torch.zeros(1, 1, 2, 2, device=stage.device)
    output = stage.attention(scores, block_means(value, blocks), torch.float32)
    assert torch.equal(output, torch.full_like(output, 2.0)) and output.shape == (1, 1, 2, 16)


def test_large_scores_do_not_overflow(stage: CoarseStage) -> None:
    scores = torch.tensor([[[[3e4, 3e4, -3e4]]]], device=stage.device)
    value = torch.tensor([1.0, 3.0, 9.0], device=stage.device).view(1, 1, 3, 1).repeat(1, 1, 1, 16)
    assert torch.equal(
        stage.attention(scores, value, torch.float32), torch.full((1, 1, 1, 16), 2.0, device=stage.device)
    )


def test_gradient_of_a_mean_is_shared_evenly() -> None:
    tensor = torch.zeros(1, 60, 1, 1, dtype=torch.float64, requires_grad=True)
    block_means(tensor, video_tiles(GRID, TILE, torch.device("cpu"))).sum().backward()
    assert tensor.grad is not None
    for tokens in tiles_of(GRID, TILE):
        share = torch.full((len(tokens),), 1 / len(tokens), dtype=torch.float64)
        torch.testing.assert_close(tensor.grad[0, tokens, 0, 0], share)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_more_pairs_of_blocks_than_32_bits_count(device: str) -> None:
    """Blocks of one token, of a sequence that is no longer than a video's."""
    blocks, size = 46400, 16
    query, key, value = (randn(1, 1, blocks, size, seed=seed).to(device) for seed in range(3))
    scores = coarse_scores(query, key, 0.3)
    last = query[:, :, -1:].double() @ key.double().mT * 0.3
    torch.testing.assert_close(scores[:, :, -1:].double(), last, atol=1e-5, rtol=1e-5)
    output = coarse_attention(scores, value)
    wanted = last.softmax(-1) @ value.double()
    torch.testing.assert_close(output[:, :, -1:].double(), wanted, atol=1e-5, rtol=1e-5)
