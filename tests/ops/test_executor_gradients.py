"""Gradients of block-sparse attention against autograd through dense attention with a mask of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn.ops.block_sparse import torch_executor
from omni_attn.ops.block_sparse.executor import CoarseTerm
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.video_sparse import video_sparse_attention
from omni_attn.ops.video_tiles import _video_tiles, video_tiles
from tests.ops.executors import TOLERANCES, ExecutorCase, blocks_of, some_blocks
from tests.ops.vsa_oracle import Selection, scores_of, selection_of

GRID, TILE = (3, 5, 6), (2, 4, 4)
SCALE = 0.3


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def membership(blocks: BlockPartition) -> torch.Tensor:
    """float64 [blocks, S]: 1 where a token belongs to a block."""
    rows = torch.zeros(blocks.num_blocks, blocks.tokens, dtype=torch.float64)
    for block, tokens in enumerate(blocks_of(blocks)):
        rows[block, tokens] = 1
    return rows


def masked_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_blocks: BlockPartition,
    key_blocks: BlockPartition,
    selection: Selection,
) -> torch.Tensor:
    """Attention over all tokens with those of unselected blocks masked, differentiable."""
    chosen = torch.zeros(query.shape[0], query.shape[2], query_blocks.num_blocks, key_blocks.num_blocks)
    for b, heads in enumerate(selection):
        for h, rows in enumerate(heads):
            for i, row in enumerate(rows):
                chosen[b, h, i, list(row)] = 1
    seen = (membership(query_blocks).T @ chosen.double() @ membership(key_blocks)) > 0
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * SCALE
    weights = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
    return torch.einsum("bhqk,bkhd->bqhd", weights, value)


def compare(
    found: list[torch.Tensor], expected: list[torch.Tensor], direction: torch.Tensor, output: torch.Tensor
) -> None:
    """Gradients that a direction of the output gives; `expected` has them already."""
    (output * direction.to(output)).sum().backward()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        tolerance = 10 * TOLERANCES[ours.dtype]
        torch.testing.assert_close(ours.grad.cpu().double(), theirs.grad, rtol=tolerance, atol=tolerance)


@pytest.fixture
def differentiable(executor: ExecutorCase) -> ExecutorCase:
    """An executor that has gradients."""
    if not executor.make().differentiable:
        pytest.skip(f"{executor} has no gradients")
    return executor


@pytest.mark.parametrize(
    ("keys", "batch", "heads", "kv_heads"), [("same", 2, 2, 1), ("other", 1, 2, 2), ("other", 1, 3, 1)]
)
def test_gradients_of_attention(
    differentiable: ExecutorCase, keys: str, batch: int, heads: int, kv_heads: int
) -> None:
    """Ragged tiles, rows without a block, tokens that nobody selects, another number of keys than of queries."""
    executor = differentiable
    video = video_tiles(GRID, TILE, torch.device(executor.device))
    key_blocks = video if keys == "same" else BlockPartition.in_order(41, 24, executor.device)
    tensors = executor.tensors(
        executor.dtypes[0], 90, key_blocks.tokens, batch=batch, heads=heads, kv_heads=kv_heads, value_size=32
    )
    selection = some_blocks(batch, heads, 8, key_blocks.num_blocks, most=3, seed=2)
    generator = torch.Generator().manual_seed(4)
    size = tensors[2].shape[-1]
    coarse = torch.randn(batch, heads, 8, size, generator=generator, dtype=torch.float64)
    gate = torch.randn(batch, 90, heads, size, generator=generator, dtype=torch.float64)
    direction = torch.randn(batch, 90, heads, size, generator=generator, dtype=torch.float64)

    expected = leaves(*(x.cpu().double() for x in tensors), coarse, gate)
    fine = masked_dense(expected[0], expected[1], expected[2], video, key_blocks, selection)
    per_token = torch.einsum("ns,bhnd->bshd", membership(video), expected[3])
    ((fine + expected[4] * per_token) * direction).sum().backward()

    wide = tensors[0].dtype if tensors[0].dtype == torch.float64 else torch.float32
    found = leaves(*tensors, coarse.to(executor.device, wide), gate.to(tensors[0]))
    term = CoarseTerm(found[3], found[4])
    output = executor.attend((found[0], found[1], found[2]), video, key_blocks, selection, SCALE, term)
    compare(found, expected, direction, output)


def test_gradients_of_video_sparse_attention(differentiable: ExecutorCase) -> None:
    """Query, key, value and gate, through both branches; the selection is a constant."""
    executor = differentiable
    video = video_tiles(GRID, TILE, torch.device(executor.device))
    tensors = executor.tensors(executor.dtypes[0], 90, 90, batch=2, heads=2, kv_heads=1)
    query, key, value = (x.cpu().double() for x in tensors)
    gate, direction = (
        torch.randn(query.shape, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        for n in (5, 6)
    )

    listed = blocks_of(video)
    selection = selection_of(scores_of(query, key, listed, listed, SCALE), 3)
    expected = leaves(query, key, value, gate)
    means = membership(video) / membership(video).sum(1, keepdim=True)
    query_means, key_means, value_means = (torch.einsum("ns,bshd->bhnd", means, x) for x in expected[:3])
    weights = (query_means @ key_means.mT * SCALE).softmax(-1)
    per_token = torch.einsum("ns,bhnd->bshd", membership(video), weights @ value_means)
    fine = masked_dense(expected[0], expected[1], expected[2], video, video, selection)
    ((fine + expected[3] * per_token) * direction).sum().backward()

    found = leaves(*tensors, gate.to(tensors[0]))
    output = video_sparse_attention(executor.make(), *found[:3], video, 3, SCALE, gate=found[3])
    compare(found, expected, direction, output)


def test_gradients_with_a_gate_of_zeros(differentiable: ExecutorCase) -> None:
    """A gate that starts at zero must learn."""
    executor = differentiable
    video = video_tiles(GRID, TILE, torch.device(executor.device))
    tensors = executor.tensors(executor.dtypes[0], 90, 90)
    gate = torch.zeros_like(tensors[0], requires_grad=True)
    video_sparse_attention(executor.make(), *tensors, video, 3, SCALE, gate=gate).sum().backward()
    assert gate.grad is not None and gate.grad.abs().min() > 0


def test_a_row_without_a_block_has_no_gradient(differentiable: ExecutorCase) -> None:
    """Zeros, not NaN."""
    executor = differentiable
    video = video_tiles(GRID, TILE, torch.device(executor.device))
    found = leaves(*executor.tensors(executor.dtypes[0], 90, 90, heads=1, kv_heads=1))
    selection = [[[[]] * 8]]
    executor.attend((found[0], found[1], found[2]), video, video, selection, SCALE).sum().backward()
    for x in found:
        assert x.grad is None or not x.grad.any()


@pytest.mark.parametrize("elements", [1, 3000, 20000])
def test_the_torch_executor_may_work_in_chunks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    """Outputs and gradients are the same."""
    executor = ExecutorCase("torch", torch_executor.TorchExecutor, (torch.float64,))
    video = video_tiles(GRID, TILE, torch.device("cpu"))
    tensors = executor.tensors(torch.float64, 90, 90, batch=2, heads=2, kv_heads=1)
    outputs, gradients = [], []
    for chunk in (2**24, elements):
        monkeypatch.setattr(torch_executor, "_CHUNK_ELEMENTS", chunk)
        found = leaves(*tensors)
        selection = some_blocks(2, 2, 8, 8, most=3, seed=2)
        outputs.append(executor.attend((found[0], found[1], found[2]), video, video, selection, SCALE))
        outputs[-1].square().sum().backward()
        gradients.append([x.grad for x in found])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_the_torch_executor_keeps_to_its_chunks_where_blocks_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys of a chunk are D numbers each, more than the few scores of a block of two tokens."""
    monkeypatch.setattr(torch_executor, "_CHUNK_ELEMENTS", 2**14)
    gathered: list[int] = []

    def gather(*args: Any) -> torch.Tensor:
        found = plain(*args)
        gathered.append(found.numel())
        return found

    plain = torch_executor._gather
    monkeypatch.setattr(torch_executor, "_gather", gather)
    video = video_tiles((2, 4, 8), (1, 1, 2), torch.device("cpu"))
    query, key, value = torch.randn(3, 1, 64, 1, 128).unbind()
    video_sparse_attention(torch_executor.TorchExecutor(), query, key, value, video, 16, SCALE)
    assert max(gathered) <= 2**14


def test_a_partition_first_used_for_inference_serves_training_too(differentiable: ExecutorCase) -> None:
    """What a partition keeps was made in inference mode then."""
    executor, grid = differentiable, (3, 3, 5)
    _video_tiles.cache_clear()
    with torch.inference_mode():
        video = video_tiles(grid, TILE, torch.device(executor.device))
        tensors = executor.tensors(executor.dtypes[0], 45, 45)
        video_sparse_attention(executor.make(), *tensors, video, 2, SCALE, coarse=True)
    found = leaves(*executor.tensors(executor.dtypes[0], 45, 45))
    video = video_tiles(grid, TILE, torch.device(executor.device))
    video_sparse_attention(executor.make(), *found, video, 2, SCALE, coarse=True).sum().backward()
    assert all(x.grad is not None and x.grad.any() for x in found)


def test_unselected_tokens_do_not_leak_into_gradients(differentiable: ExecutorCase) -> None:
    """Not even NaN, in a block that no row selects and in a row of its own."""
    executor = differentiable
    video = video_tiles(GRID, TILE, torch.device(executor.device))
    listed = blocks_of(video)
    selection = [[[[2, 3], [1], [7], [4, 5], [3, 7], [], [1, 4], [2]]]]
    tensors = executor.tensors(executor.dtypes[0], 90, 90)
    gradients = []
    for bad in (1.0, float("nan")):
        found = leaves(*tensors)
        with torch.no_grad():
            for block in (0, 6):
                found[1][:, listed[block]] = bad
                found[2][:, listed[block]] = bad
        output = executor.attend((found[0], found[1], found[2]), video, video, selection, SCALE)
        output.square().sum().backward()
        gradients.append([x.grad for x in found])
    for whole, broken in zip(*gradients, strict=True):
        assert whole is not None and broken is not None and torch.equal(whole, broken)
