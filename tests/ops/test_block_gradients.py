"""Gradients of block-sparse attention in torch against all scores, masked token by token, in float64."""

from __future__ import annotations

import pytest
import torch

from omni_attn.ops.block_sparse.executor import CoarseTerm, SelectedBlocks
from omni_attn.ops.block_sparse.gradients import attend_with_gradients, means_with_gradient
from omni_attn.ops.block_sparse.means import block_means
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.video_sparse import video_sparse_attention
from omni_attn.ops.video_tiles import partition, tile_sizes, video_tiles

SCALE = 0.3
CPU = torch.device("cpu")


def random(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def averages(blocks: list[list[int]]) -> torch.Tensor:
    """[blocks, S]: a product with it takes the mean of each block."""
    matrix = torch.zeros(len(blocks), sum(map(len, blocks)), dtype=torch.float64)
    for block, tokens in enumerate(blocks):
        matrix[block, tokens] = 1 / len(tokens)
    return matrix


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """[B, Sq, H, Dv] over the pairs in `seen` [B, H, Sq, Sk]; rows that see nothing are zeros."""
    share = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(share, 2), value.repeat_interleave(share, 2)
    weights = (torch.einsum("bqhd,bkhd->bhqk", query, key) * SCALE).exp() * seen
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bkhd->bqhd", weights / total.where(total > 0, 1.0), value)


@pytest.mark.parametrize("topk", [1, 3, 8])
def test_video_sparse_attention(topk: int) -> None:
    """Query, key, value and gate, over ragged tiles, with grouped heads and two batch items."""
    grid, tile, batch, heads, groups = (3, 4, 5), (2, 3, 4), 2, 4, 2
    query, key, value, gate, weights = random(
        *((batch, 60, n, 6) for n in (heads, groups, groups, heads, heads))
    )
    order, cuts = partition(grid, tile).tolist(), tile_sizes(grid, tile)
    blocks = [order[sum(cuts[:i]) : sum(cuts[: i + 1])] for i in range(len(cuts))]
    matrix = averages(blocks)
    of_token = (matrix > 0).to(torch.float64)
    query_means, key_means, value_means = (
        torch.einsum("ns,bshd->bhnd", matrix, x.repeat_interleave(heads // x.shape[2], 2))
        for x in (query, key, value)
    )
    scores = query_means @ key_means.mT * SCALE
    least = scores.detach().sort(-1, descending=True).values[..., topk - 1, None]
    listed = (scores.detach() >= least).to(torch.float64)
    seen = of_token.T @ listed @ of_token
    coarse = torch.einsum("bhnd,ns->bshd", scores.softmax(-1) @ value_means, of_token)
    expected = masked_attention(query, key, value, seen) + gate * coarse

    tiles = video_tiles(grid, tile, CPU)
    found = video_sparse_attention(TorchExecutor(), query, key, value, tiles, topk, SCALE, gate=gate)
    torch.testing.assert_close(found, expected)
    inputs = (query, key, value, gate)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, weights),
        torch.autograd.grad(expected, inputs, weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_other_keys_than_queries_and_rows_without_a_key() -> None:
    query, key, value, gate, weights = random(
        (2, 11, 2, 4), (2, 9, 1, 4), (2, 9, 1, 5), (2, 11, 2, 5), (2, 11, 2, 5)
    )
    query_blocks = BlockPartition.of(torch.randperm(11), [5, 1, 5], 5, CPU)
    key_blocks = BlockPartition.of(torch.randperm(9), [4, 2, 3], 6, CPU)
    indices = torch.tensor([[0, 2], [1, 9], [-1, -1]], dtype=torch.int32).expand(2, 2, 3, 2)
    counts = torch.tensor([2, 1, 0], dtype=torch.int32).expand(2, 2, 3)
    listed = torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 0, 0]], dtype=torch.float64)
    seen = listed[query_blocks.block_of][:, key_blocks.block_of].expand(2, 2, 11, 9)
    [coarse] = random((2, 2, 3, 5))
    expected = masked_attention(query, key, value, seen)
    expected = expected + gate * coarse.transpose(1, 2)[:, query_blocks.block_of]

    executor = TorchExecutor()
    packed = executor.pack(query, key, value, query_blocks, key_blocks)
    found = executor.attend(packed, SelectedBlocks(indices, counts), SCALE, CoarseTerm(coarse, gate))
    inputs = (query, key, value, gate, coarse)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, weights),
        torch.autograd.grad(expected, inputs, weights),
        strict=True,
    ):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs)


def test_means_of_a_kernel_have_the_gradient_of_block_means() -> None:
    [tensor] = random((2, 11, 3, 4))
    blocks = BlockPartition.of(torch.randperm(11), [5, 1, 5], 5, CPU)
    [weights] = random((2, 3, 3, 4))
    expected = block_means(tensor, blocks)
    found = means_with_gradient(tensor, expected.detach(), blocks)
    assert torch.equal(found, expected)
    gradients = (torch.autograd.grad(means, tensor, weights)[0] for means in (found, expected))
    torch.testing.assert_close(*gradients)


def test_a_kernels_gradients_reach_its_inputs_in_order() -> None:
    """What the backward is given, and where what it gives goes."""
    query, key, value, grad_output = random((1, 2, 1, 1), (1, 3, 1, 1), (1, 3, 1, 1), (1, 2, 1, 1))
    blocks = (BlockPartition.in_order(2, 2, CPU), BlockPartition.in_order(3, 2, CPU))
    selected = SelectedBlocks(
        torch.zeros(1, 1, 1, 1, dtype=torch.int32), torch.ones(1, 1, 1, dtype=torch.int32)
    )
    output, lse = torch.full((1, 2, 1, 1), 7.0, dtype=torch.float64), torch.full((1, 1, 2), 3.0)
    given: list[object] = []

    def backward(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        given.extend(arguments)
        return query.detach() + 1, key.detach() + 2, value.detach() + 3

    found = attend_with_gradients(
        lambda: (output, lse), backward, query, key, value, selected, *blocks, SCALE
    )
    assert torch.equal(found, output) and found.requires_grad
    grads = torch.autograd.grad(found, (query, key, value), grad_output)
    assert all(torch.equal(g, x + n) for g, x, n in zip(grads, (query, key, value), (1, 2, 3), strict=True))
    for mine, theirs in zip(given, (query, key, value, output, grad_output, lse), strict=False):
        assert isinstance(mine, torch.Tensor) and torch.equal(mine, theirs)
    indices, counts = given[6]  # type: ignore[misc]
    assert torch.equal(indices, selected.indices) and torch.equal(counts, selected.counts)
    assert (*given[7:9], given[9]) == (*blocks, SCALE)
