"""Video sparse attention as a whole: both branches, against float64 and what they reduce to."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from omni_attn.ops.block_sparse.means import coarse_scores
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.selectors import mean_topk
from omni_attn.ops.reference import reference_attention
from omni_attn.ops.video_sparse import video_sparse_attention
from omni_attn.ops.video_tiles import video_tiles
from tests.ops.executors import (
    ExecutorCase,
    Tensors,
    View,
    assert_near,
    random_examples,
    stored_heads_first,
    stored_with_gaps,
    stored_with_others,
)
from tests.ops.vsa_oracle import Extent, broadcast, coarse_of, margin_of, scores_of, tiles_of, vsa_of

GRID, TILE = (3, 5, 6), (2, 4, 4)
TILES = tiles_of(GRID, TILE)
SCALE = 0.3


def tiles_on(executor: ExecutorCase, grid: Extent = GRID, tile: Extent = TILE) -> BlockPartition:
    return video_tiles(grid, tile, torch.device(executor.device))


def vsa(
    executor: ExecutorCase,
    tensors: Tensors,
    topk: int,
    *,
    gate: torch.Tensor | None = None,
    coarse: bool = False,
) -> torch.Tensor:
    tiles = tiles_on(executor)
    return video_sparse_attention(executor.make(), *tensors, tiles, topk, SCALE, gate=gate, coarse=coarse)


def gate_of(executor: ExecutorCase, tensors: Tensors, seed: int = 9) -> torch.Tensor:
    query, _, value = tensors
    shape = (*query.shape[:3], value.shape[-1])
    gate = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return gate.to(executor.device, query.dtype)


@random_examples
@given(st.data())
def test_any_grid_budget_and_gate(executor: ExecutorCase, data: st.DataObject) -> None:
    draw = data.draw
    grid = draw(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6)))
    tile = draw(st.sampled_from([(4, 4, 4), (2, 2, 4), (2, 2, 2), (4, 8, 8), (1, 3, 5)]))
    batch, heads, kv_heads = draw(st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 2, 2)]))
    dtype, seed = draw(st.sampled_from(executor.dtypes)), draw(st.integers(0, 99))
    expected_tiles, tokens = tiles_of(grid, tile), grid[0] * grid[1] * grid[2]
    rows = batch * heads * len(expected_tiles)
    assume(rows <= 48)
    topk = draw(st.integers(1, min(len(expected_tiles), max(1, 48 // rows))))
    tensors = executor.tensors(
        dtype, tokens, tokens, batch=batch, heads=heads, kv_heads=kv_heads, value_size=32, seed=seed
    )
    gate = draw(st.sampled_from([gate_of(executor, tensors, seed), None]))
    coarse = draw(st.booleans())
    query, key, _ = (x.cpu() for x in tensors)
    assume(margin_of(scores_of(query, key, expected_tiles, expected_tiles, SCALE), topk) > 1e-5)
    tiles = tiles_on(executor, grid, tile)
    output = video_sparse_attention(executor.make(), *tensors, tiles, topk, SCALE, gate=gate, coarse=coarse)
    assert output.dtype == dtype and output.is_contiguous()
    assert_near(output, vsa_of(*tensors, expected_tiles, topk, SCALE, gate=gate, coarse=coarse))


def wave(heads: int, formula: View) -> torch.Tensor:
    """float64 [1, 210, heads, 8] of a phase in token s, head n and channel d."""
    s, n, d = torch.meshgrid(*(torch.arange(size).double() for size in (210, heads, 8)), indexing="ij")
    return formula(torch.stack([s, n, d]))[None]


def vector_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        wave(2, lambda x: 2 * torch.sin(0.37 * x[0] + 0.5 * x[1] + 0.9 * x[2])),
        wave(2, lambda x: 2 * torch.sin(0.23 * x[0] + 0.7 * x[1] + 0.6 * x[2] + 0.3)),
        wave(2, lambda x: torch.sin(0.11 * x[0] + 0.2 * x[1] + 0.4 * x[2] + 0.7)),
        wave(2, lambda x: torch.sin(0.05 * x[0] + 0.3 * x[1] + 0.2 * x[2] + 0.1)),
    )


# topk of 8, gate, out[0, 0, :4], out[209, 1, :4], out[100, 0, 0], sum, sum of squares
VECTORS = {
    "two tiles and a gate": (
        2,
        True,
        (-0.363994, -0.724344, -0.989182, -1.106018),
        (0.106747, 0.220309, 0.294643, 0.314448),
        -0.283693848,
        -748.637754475,
        976.905737875,
    ),
    "two tiles": (
        2,
        False,
        (-0.358771, -0.690579, -0.913360, -0.991942),
        (0.072815, 0.128764, 0.164384, 0.174051),
        -0.332136381,
        -731.780623743,
        920.138688954,
    ),
    "all tiles and a gate": (
        8,
        True,
        (0.045565, -0.002181, -0.068428, -0.132040),
        (0.029749, 0.063097, 0.082038, 0.080015),
        0.092665771,
        -155.511568752,
        38.156198856,
    ),
    "all tiles": (
        8,
        False,
        (0.050789, 0.031585, 0.007394, -0.017964),
        (-0.004182, -0.028448, -0.048222, -0.060382),
        0.044223238,
        -138.654438020,
        10.345301071,
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_published_numbers(executor: ExecutorCase, name: str) -> None:
    """Of sine waves on a grid of (5, 6, 7); channels of zeros change nothing, and make the head size one that fits."""
    topk, gated, first, last, middle, total, squares = VECTORS[name]
    dtype, tiles = executor.dtypes[0], tiles_on(executor, (5, 6, 7), (4, 4, 4))
    assert tiles.sizes == (64, 48, 32, 24, 16, 12, 8, 6)
    fill = (0, executor.head_size(8) - 8)
    query, key, value, gate = (
        torch.nn.functional.pad(x, fill).to(executor.device, dtype) for x in vector_case()
    )
    output = video_sparse_attention(
        executor.make(), query, key, value, tiles, topk, 8**-0.5, gate=gate if gated else None
    )[0, :, :, :8].cpu()
    exact = 1e-8 if dtype == torch.float64 else 2e-5
    printed = pytest.approx(first, abs=max(exact, 5e-7)), pytest.approx(last, abs=max(exact, 5e-7))
    assert (output[0, 0, :4].tolist(), output[209, 1, :4].tolist()) == printed
    assert output[100, 0, 0].item() == pytest.approx(middle, abs=exact)
    assert output.double().sum().item() == pytest.approx(total, abs=1e-8 if exact == 1e-8 else 5e-3)
    assert output.double().square().sum().item() == pytest.approx(
        squares, abs=1e-8 if exact == 1e-8 else 5e-3
    )


def test_published_scores_and_selection(executor: ExecutorCase) -> None:
    dtype, tiles = executor.dtypes[0], tiles_on(executor, (5, 6, 7), (4, 4, 4))
    fill = (0, executor.head_size(8) - 8)
    tensors = (torch.nn.functional.pad(x, fill).to(executor.device, dtype) for x in vector_case()[:3])
    means = executor.make().pack(*tensors, tiles, tiles).means
    scores = coarse_scores(means.query, means.key, 8**-0.5)
    printed = [0.000073, -0.000116, -0.006027, -0.005098, -0.002027, -0.001002, 0.020790, 0.050969]
    assert scores[0, 0, 0].tolist() == pytest.approx(printed, abs=1e-6)
    selected = mean_topk(scores, 2).indices[0, :, :, :2].tolist()
    both = [[6, 7], [0, 7], [6, 7], [6, 7], [3, 6], [6, 7], [2, 3], [3, 6]]
    assert selected[0] == both
    assert selected[1] == [[6, 7], [0, 7], [3, 6], [6, 7], [3, 6], [6, 7], [2, 3], [2, 3]]


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_all_tiles_are_dense_attention(executor: ExecutorCase, kv_heads: int) -> None:
    """Without a gate, and with one of zeros; a gate of numbers adds the attention between tiles to it."""
    tensors = executor.tensors(executor.dtypes[0], 90, 90, heads=2, kv_heads=kv_heads)
    dense = reference_attention(*(x.cpu() for x in tensors), softmax_scale=SCALE)[0]
    gate = gate_of(executor, tensors)
    assert_near(vsa(executor, tensors, 8), dense)
    assert_near(vsa(executor, tensors, 8, gate=torch.zeros_like(gate)), dense)
    query, key, value = (x.cpu() for x in tensors)
    between = coarse_of(scores_of(query, key, TILES, TILES, SCALE), value, TILES)
    assert_near(vsa(executor, tensors, 8, gate=gate), dense + broadcast(between, TILES, gate))


def test_what_a_missing_gate_means(executor: ExecutorCase) -> None:
    """Sparse attention only; the coarse part counts once, unweighted, if it is asked for."""
    tensors = executor.tensors(executor.dtypes[0], 90, 90)
    gate = gate_of(executor, tensors)
    alone, zero = vsa(executor, tensors, 3), vsa(executor, tensors, 3, gate=torch.zeros_like(gate))
    assert torch.equal(alone, zero)
    once = vsa(executor, tensors, 3, coarse=True)
    # A GPU fuses the product with the sum, in the last bit.
    torch.testing.assert_close(once, vsa(executor, tensors, 3, gate=torch.ones_like(gate)))
    assert (once - alone).abs().max() > 0.01
    both = vsa(executor, tensors, 3, gate=gate, coarse=True)
    assert torch.equal(both, vsa(executor, tensors, 3, gate=gate))


def test_the_gate_is_used_as_it_is(executor: ExecutorCase) -> None:
    """No activation: what it adds doubles with it, and turns its sign."""
    tensors = executor.tensors(executor.dtypes[0], 90, 90)
    gate = gate_of(executor, tensors)
    alone = vsa(executor, tensors, 2)
    added = vsa(executor, tensors, 2, gate=gate) - alone
    for factor in (2.0, -1.0, -4.0):
        expected = (factor * added).cpu().double()
        assert_near(vsa(executor, tensors, 2, gate=factor * gate) - alone, expected)


def test_a_grid_inside_one_tile_is_dense_attention(executor: ExecutorCase) -> None:
    tensors = executor.tensors(executor.dtypes[0], 12, 12)
    tiles = tiles_on(executor, (2, 2, 3), (4, 4, 4))
    output = video_sparse_attention(executor.make(), *tensors, tiles, 1, SCALE)
    assert_near(output, reference_attention(*(x.cpu() for x in tensors), softmax_scale=SCALE)[0])


def test_ties_everywhere(executor: ExecutorCase) -> None:
    """Equal queries and keys: the first tiles are taken, and their values averaged."""
    query, key, value = executor.tensors(executor.dtypes[0], 90, 90)
    query.fill_(0.5)
    key.fill_(0.25)
    output = vsa(executor, (query, key, value), 3)
    taken = [token for tile in TILES[:3] for token in tile]
    expected = value[:, taken].cpu().double().mean(1, keepdim=True)
    assert_near(output, expected.expand(1, 90, 1, -1))


def test_one_batch_is_many_calls(executor: ExecutorCase) -> None:
    """Every batch entry and every head selects for itself."""
    tensors = executor.tensors(executor.dtypes[0], 90, 90, batch=2, heads=2, kv_heads=2)
    gate = gate_of(executor, tensors)
    together = vsa(executor, tensors, 2, gate=gate)
    for b in range(2):
        for h in range(2):
            one = tuple(x[b : b + 1, :, h : h + 1] for x in (*tensors, gate))
            alone = vsa(executor, one[:3], 2, gate=one[3])
            assert_near(alone, together[b : b + 1, :, h : h + 1].cpu().double())


def test_permuted_batch_and_heads_permute_the_output(executor: ExecutorCase) -> None:
    tensors = executor.tensors(executor.dtypes[0], 90, 90, batch=2, heads=2, kv_heads=2)
    gate = gate_of(executor, tensors)
    flipped = tuple(x.flip(0, 2) for x in tensors)
    output = vsa(executor, flipped, 2, gate=gate.flip(0, 2))  # type: ignore[arg-type]
    assert_near(output, vsa(executor, tensors, 2, gate=gate).flip(0, 2).cpu().double())


@pytest.mark.parametrize("stored", [stored_heads_first, stored_with_others, stored_with_gaps])
def test_views_are_taken_and_left_alone(executor: ExecutorCase, stored: View) -> None:
    tensors = executor.tensors(executor.dtypes[-1], 90, 90)
    gate = gate_of(executor, tensors)
    views = [stored(x) for x in (*tensors, gate)]
    output = vsa(executor, (views[0], views[1], views[2]), 2, gate=views[3])
    assert output.is_contiguous() and torch.equal(output, vsa(executor, tensors, 2, gate=gate))
    assert all(torch.equal(view, x) for view, x in zip(views, (*tensors, gate), strict=True))


def test_blocks_of_any_cut(executor: ExecutorCase) -> None:
    """A partition need not come from a grid."""
    order = torch.randperm(50, generator=torch.Generator().manual_seed(5))
    blocks = BlockPartition.of(order, [20, 1, 7, 16, 6], 20, executor.device)
    tensors = executor.tensors(executor.dtypes[0], 50, 50)
    ends = pairwise(blocks.offsets.tolist())
    expected = vsa_of(*tensors, [order[a:b].tolist() for a, b in ends], 2, SCALE, coarse=True)
    assert_near(video_sparse_attention(executor.make(), *tensors, blocks, 2, SCALE, coarse=True), expected)


def test_a_broken_token_reaches_only_its_batch_entry_and_head(executor: ExecutorCase) -> None:
    tensors = executor.tensors(executor.dtypes[0], 90, 90, batch=2, heads=2, kv_heads=2)
    gate = gate_of(executor, tensors)
    expected = vsa(executor, tensors, 2, gate=gate)
    for x in tensors:
        x[0, 7, 1] = math.nan
    output = vsa(executor, tensors, 2, gate=gate)
    assert torch.equal(output[1], expected[1]) and torch.equal(output[0, :, 0], expected[0, :, 0])
    assert output.shape == expected.shape


def test_the_host_waits_for_nothing(executor: ExecutorCase) -> None:
    """No number of a tensor decides about the call; on the CPU, tensors without numbers show it."""
    tiles = tiles_on(executor)
    tensors = executor.tensors(executor.dtypes[0], 90, 90)
    gate = gate_of(executor, tensors)
    vsa(executor, tensors, 2, gate=gate)  # kernels are compiled, and tables made
    if executor.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            vsa(executor, tensors, 2, gate=gate)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    elif executor.name == "torch":
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = [torch.empty_like(x) for x in (*tensors, gate)]
            ours = executor.make()
            output = video_sparse_attention(ours, *fake[:3], tiles, 2, SCALE, gate=fake[3])
        assert output.shape == tensors[0].shape
    else:
        pytest.skip(f"{executor} needs numbers, and there is no device to wait for")
