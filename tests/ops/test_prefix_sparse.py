"""Video sparse attention of sequences with segments before the video, on every executor."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.reference import reference_attention
from omni_attn.ops.video_sparse import video_sparse_attention
from omni_attn.ops.video_tiles import chunk_sizes, video_tiles
from tests.ops.executors import INTERPRETED, TOLERANCES, ExecutorCase, Tensors, assert_near, random_examples
from tests.ops.prefix_oracle import blocks_of, margin, vsa_h3_of
from tests.ops.vsa_oracle import Extent, scores_of

SEGMENTS, GRID, TILE = (6, 9), (2, 4, 5), (2, 2, 4)
TOKENS = sum(SEGMENTS) + prod(GRID)
SCALE = 0.3


def run(
    executor: ExecutorCase,
    tensors: Tensors,
    topk: int = 2,
    *,
    segments: tuple[int, ...] = SEGMENTS,
    grid: Extent = GRID,
    tile: Extent = TILE,
    gate: torch.Tensor | None = None,
    coarse: bool = False,
    compete: bool = False,
) -> torch.Tensor:
    return video_sparse_attention(
        executor.make(),
        *tensors,
        video_tiles(grid, tile, torch.device(executor.device), segments),
        topk,
        SCALE,
        gate=gate,
        coarse=coarse,
        prefix_blocks=len(chunk_sizes(segments, tile)),
        compete=compete,
    )


def gate_of(tensors: Tensors, seed: int = 9) -> torch.Tensor:
    query, _, value = tensors
    shape = (*query.shape[:3], value.shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(query)


@random_examples
@given(st.data())
def test_any_sequence(executor: ExecutorCase, data: st.DataObject) -> None:
    draw = data.draw
    segments = draw(st.lists(st.sampled_from([1, 5, 8, 16, 17, 33]), min_size=1, max_size=3).map(tuple))
    grid = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)))
    tile = draw(st.sampled_from([(4, 4, 4), (2, 2, 4), (2, 2, 2), (1, 3, 5)]))
    batch, heads, kv_heads = draw(st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 1, 1)]))
    dtype, seed = draw(st.sampled_from(executor.dtypes)), draw(st.integers(0, 99))
    compete, coarse = draw(st.booleans()), draw(st.booleans())
    blocks, prefix = blocks_of(segments, grid, tile)
    video = len(blocks) - prefix
    topk = draw(st.integers(1, min(video, 3)))
    pairs = batch * heads * video * (prefix + topk)
    assume(pairs <= (40 if INTERPRETED else 300))
    tokens = sum(segments) + prod(grid)
    tensors = executor.tensors(
        dtype, tokens, tokens, batch=batch, heads=heads, kv_heads=kv_heads, value_size=32, seed=seed
    )
    gate = draw(st.sampled_from([gate_of(tensors, seed), None]))
    query, key, _ = (x.cpu() for x in tensors)
    scores = scores_of(query, key, blocks, blocks, SCALE)
    assume(topk == video or margin(scores, prefix, topk, compete=compete) > 1e-5)
    sequence = {"segments": segments, "grid": grid, "tile": tile}
    output = run(executor, tensors, topk, gate=gate, coarse=coarse, compete=compete, **sequence)
    assert output.dtype == dtype and output.is_contiguous()
    expected = vsa_h3_of(
        *tensors, segments, grid, tile, topk, SCALE, gate=gate, coarse=coarse, compete=compete
    )
    assert_near(output, expected)


@pytest.mark.parametrize("compete", [False, True])
def test_segments_are_dense_attention(executor: ExecutorCase, compete: bool) -> None:
    tensors = executor.tensors(executor.dtypes[0], TOKENS, TOKENS, heads=2, kv_heads=1)
    output = run(executor, tensors, 1, compete=compete)
    dense = reference_attention(*(x.cpu() for x in tensors), softmax_scale=SCALE)[0]
    before = sum(SEGMENTS)
    assert_near(output[:, :before], dense[:, :before])
    assert (output[:, before:].cpu().double() - dense[:, before:]).abs().max() > 0.01


@pytest.mark.parametrize("gated", [False, True], ids=["no gate", "gate"])
def test_gradients(executor: ExecutorCase, gated: bool) -> None:
    """Of query, key, value and gate, as torch's executor in float64 has them."""
    if not executor.make().differentiable:
        pytest.skip(f"{executor} has no gradients")
    tensors = executor.tensors(executor.dtypes[0], TOKENS, TOKENS, heads=2, kv_heads=1)
    inputs = [*tensors, gate_of(tensors)] if gated else [*tensors]
    exact = ExecutorCase("torch in float64", TorchExecutor, (torch.float64,))
    direction = torch.randn(1, TOKENS, 2, tensors[2].shape[-1], generator=torch.Generator().manual_seed(5))
    found = []
    for case, leaves in ((executor, inputs), (exact, [x.cpu().double() for x in inputs])):
        watched = [x.detach().clone().requires_grad_() for x in leaves]
        query, key, value = watched[:3]
        output = run(case, (query, key, value), gate=watched[3] if gated else None)
        gradients = torch.autograd.grad((output * direction.to(output)).sum(), watched)
        found.append([x.cpu().double() for x in gradients])
    limit = 10 * TOLERANCES[executor.dtypes[0]]
    for ours, expected in zip(*found, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(ours, expected, atol=limit, rtol=limit)


def test_an_autocast_region_rounds_nothing(executor: ExecutorCase) -> None:
    tensors = executor.tensors(torch.float32, TOKENS, TOKENS)
    gate = gate_of(tensors)
    expected = run(executor, tensors, gate=gate)
    with torch.autocast(executor.device, torch.bfloat16):
        output = run(executor, tensors, gate=gate)
    assert torch.equal(output, expected)


def test_parts_of_a_partition() -> None:
    blocks = video_tiles(GRID, TILE, torch.device("cpu"), SEGMENTS)
    first, behind = blocks.first(2), blocks.behind(2)
    assert (first.sizes, first.order.tolist(), first.offsets.tolist()) == (
        (6, 9),
        list(range(15)),
        [0, 6, 15],
    )
    alone = video_tiles(GRID, TILE, torch.device("cpu"))
    assert (behind.sizes, behind.capacity) == (alone.sizes, alone.capacity)
    assert torch.equal(behind.order, alone.order) and torch.equal(behind.offsets, alone.offsets)
    assert torch.equal(behind.block_of, alone.block_of)
    assert blocks.first(2) is first and blocks.behind(2) is behind, "made once"
