"""RainFusion's order of tokens, its protected blocks, and its numbers."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_attn.errors import MetadataError
from omni_attn.ops.block_sparse.rainfusion import (
    RainFusionLayout,
    protected_blocks,
    rainfusion_blocks,
    rainfusion_order,
    video_order,
)
from omni_attn.ops.block_sparse.threshold_selector import rf_softmax_threshold
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.rainfusion import rainfusion_attention
from omni_attn.ops.reference import reference_attention
from tests.ops.block_inputs import SCALE, as_lists, scores_between, token_mask, waves

CPU = torch.device("cpu")


def loop_order(grid: tuple[int, int, int]) -> list[int]:
    """The order of one video, written from its rules."""
    frames, rows, columns = grid
    irregular = rows % 8 != 0 or columns % 8 != 0
    main_rows, main_columns = rows // 8 * 8, columns // 8 * 8
    order = []
    for t in range(frames):
        frame = t * rows * columns
        if irregular and t == 0:
            order += [frame + n for n in range(rows * columns)]
            continue
        for top in range(0, main_rows, 8):
            for left in range(0, main_columns, 8):
                order += [frame + (top + h) * columns + left + w for h in range(8) for w in range(8)]
        order += [frame + h * columns + w for h in range(main_rows, rows) for w in range(columns)]
        order += [frame + h * columns + w for h in range(main_rows) for w in range(main_columns, columns)]
    return order


def test_regular_frames_are_cut_into_patches() -> None:
    order = video_order((1, 8, 16)).tolist()
    assert order[:16] == [*range(8), *range(16, 24)] and order[64:73] == [*range(8, 16), 24]


def test_irregular_frames_keep_their_leftovers_behind_their_patches() -> None:
    order = video_order((3, 9, 10)).tolist()
    assert order[:90] == list(range(90))
    behind = order[90 + 64 : 180]
    assert behind[:10] == list(range(170, 180)) and behind[10:14] == [98, 99, 108, 109]
    assert behind[-2:] == [168, 169]


@given(st.tuples(st.integers(1, 4), st.integers(1, 26), st.integers(1, 26)))
@settings(max_examples=60)
def test_every_grid_equals_a_loop(grid: tuple[int, int, int]) -> None:
    order = video_order(grid).tolist()
    assert order == loop_order(grid) and sorted(order) == list(range(prod(grid)))


def test_one_video_moves_its_prefix_behind_itself() -> None:
    layout = RainFusionLayout(232, ((40, (3, 8, 8)),))
    order, protected = rainfusion_order(layout, 32), protected_blocks(layout, 32)
    assert order[:192].tolist() == [40 + n for n in loop_order((3, 8, 8))]
    assert order[192:].tolist() == list(range(40))
    assert protected == {0, 1, 6, 7}


def test_the_block_that_holds_video_and_prefix_is_protected() -> None:
    protected = protected_blocks(RainFusionLayout(205, ((5, (2, 10, 10)),)), 64)
    assert protected == {0, 1, 3}  # the prefix starts at row 200, in the fourth block
    protected = protected_blocks(RainFusionLayout(200, ((0, (2, 10, 10)),)), 64)
    assert protected == {0, 1}


def test_several_videos_start_on_blocks_of_their_own() -> None:
    """Rows: 20 of text, video of 100, 30 of text, video of 50, 10 of text; blocks of 32."""
    layout = RainFusionLayout(210, ((20, (2, 5, 10)), (150, (5, 2, 5))))
    order, protected = rainfusion_order(layout, 32), protected_blocks(layout, 32)
    context = [*range(20), *range(120, 150), *range(200, 210)]
    first, second = ([20 + n for n in loop_order((2, 5, 10))], [150 + n for n in loop_order((5, 2, 5))])
    assert order.tolist() == first + context[:28] + second + context[28:]
    assert protected == {0, 1, 3} | {4} | {5, 6}  # frames of 50 and 10 rows; a filled block; what is left
    assert sorted(order.tolist()) == list(range(210))


def test_several_videos_without_enough_rows_to_fill_a_block() -> None:
    layout = RainFusionLayout(170, ((20, (2, 5, 10)), (120, (5, 2, 5))))
    assert layout.missing_rows(32) == 8
    with pytest.raises(MetadataError, match="8 of them are missing"):
        rainfusion_order(layout, 32)
    exact = RainFusionLayout(178, ((28, (2, 5, 10)), (128, (5, 2, 5))))
    assert exact.missing_rows(32) == 0
    assert len(rainfusion_order(exact, 32)) == 178
    assert protected_blocks(exact, 32) == {0, 1, 3, 4}


@pytest.mark.parametrize("spans", [((8, (1, 2, 5)),), ((0, (1, 2, 4)), (7, (1, 1, 1))), ((0, (0, 2, 4)),)])
def test_spans_that_cannot_be(spans: tuple[tuple[int, tuple[int, int, int]], ...]) -> None:
    with pytest.raises(MetadataError, match="needs to start"):
        RainFusionLayout(16, spans)


def test_blocks_are_kept_by_layout_and_device() -> None:
    layout = RainFusionLayout(232, ((40, (3, 8, 8)),))
    blocks = rainfusion_blocks(layout, 32, CPU)
    assert rainfusion_blocks(RainFusionLayout(232, ((40, (3, 8, 8)),)), 32, CPU) is blocks
    assert blocks.partition.sizes == (32,) * 7 + (8,)
    assert blocks.protected.tolist() == [True, True, False, False, False, False, True, True]


def test_the_published_map_and_output() -> None:
    query, key, value = waves(232)
    blocks = rainfusion_blocks(RainFusionLayout(232, ((40, (3, 8, 8)),)), 32, CPU)
    selected = rf_softmax_threshold(scores_between(query, key, blocks.partition), 4, blocks.protected)
    every = list(range(8))
    middle = [[0, 1, 2, 5, 6, 7], [0, 1, 5, 6, 7], [0, 1, 4, 5, 6, 7], [0, 1, 4, 5, 6, 7]]
    assert as_lists(selected, 0) == as_lists(selected, 1) == [every, every, *middle, every, every]
    output = rainfusion_attention(TorchExecutor(), query, key, value, blocks, 0.5, SCALE)[0]
    for (token, head), expected in {
        (0, 0): (0.041365, 0.066832, 0.081747, 0.083757),
        (231, 1): (-0.047754, -0.064207, -0.070523, -0.065705),
        (120, 0): (0.140423, 0.221725, 0.268023, 0.272005),
    }.items():
        found = output[token, head, :4]
        torch.testing.assert_close(found, torch.tensor(expected).double(), atol=1e-6, rtol=0)
    assert output.sum().item() == pytest.approx(13.841127071, abs=1e-6)
    assert output.square().sum().item() == pytest.approx(20.575485104, abs=1e-6)


def loop_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    order: list[int],
    protected: frozenset[int],
    sparsity: float,
    block: int,
) -> torch.Tensor:
    """[S, H, D] of one item, block by block, with shared key heads; from the published steps."""
    blocks = [order[start : start + block] for start in range(0, len(order), block)]
    keep = min(max(1, -int(-len(blocks) * (1 - sparsity) // 1)), len(blocks))
    output = torch.zeros_like(query)
    for head in range(query.shape[1]):
        q, k, v = query[:, head], *(x[:, head * x.shape[1] // query.shape[1]] for x in (key, value))
        key_means = torch.stack([k[rows].mean(0) for rows in blocks])
        for number, rows in enumerate(blocks):
            weights = (key_means @ q[rows].mean(0) * q.shape[-1] ** -0.5).softmax(0)
            threshold = weights.sort(descending=True).values[keep - 1]
            kept = [
                column
                for column in range(len(blocks))
                if weights[column] >= threshold or number in protected or column in protected
            ]
            seen = [token for column in kept for token in blocks[column]]
            attention = (q[rows] @ k[seen].T * q.shape[-1] ** -0.5).softmax(-1)
            output[rows, head] = attention @ v[seen]
    return output


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(
    "layout",
    [
        RainFusionLayout(90, ((0, (2, 5, 9)),)),
        RainFusionLayout(192 + 11, ((11, (3, 8, 8)),)),
        RainFusionLayout(210, ((20, (2, 5, 10)), (150, (5, 2, 5)))),
    ],
    ids=str,
)
def test_attention_equals_a_loop(layout: RainFusionLayout, sparsity: float) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, layout.used_len, heads, 8) for heads in (4, 2, 2))
    query, key, value = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    blocks = rainfusion_blocks(layout, 32, CPU)
    output = rainfusion_attention(TorchExecutor(), query, key, value, blocks, sparsity, SCALE)
    assert output.is_contiguous()
    order, protected = rainfusion_order(layout, 32), protected_blocks(layout, 32)
    for item in range(2):
        expected = loop_attention(
            query[item], key[item], value[item], order.tolist(), protected, sparsity, 32
        )
        torch.testing.assert_close(output[item], expected)
    if sparsity == 0:
        torch.testing.assert_close(output, reference_attention(query, key, value)[0])


@pytest.mark.parametrize("tokens", [128, 192, 200, 90])
def test_b43_short_tails_take_part(tokens: int) -> None:
    """Sizes around one and two blocks of 128: the result is that of the block map, whose last block is a tail."""
    grid = (1, tokens // 2, 2)
    blocks = rainfusion_blocks(RainFusionLayout(tokens, ((0, grid),)), 128, CPU)
    assert blocks.partition.sizes == tuple(b - a for a, b in pairwise([*range(0, tokens, 128), tokens]))
    query, key, value = waves(tokens)
    selected = rf_softmax_threshold(scores_between(query, key, blocks.partition), 1)
    executor = TorchExecutor()
    packed = executor.pack(query, key, value, blocks.partition, blocks.partition)
    output = executor.attend(packed, selected, SCALE)
    mask = token_mask(selected, blocks.partition)
    torch.testing.assert_close(output, reference_attention(query, key, value, attn_mask=mask)[0])
    whole = rainfusion_attention(executor, query, key, value, blocks, 0.9, SCALE)
    torch.testing.assert_close(
        whole, reference_attention(query, key, value)[0]
    )  # one frame: all is protected


def test_kept_blocks_serve_calls_with_gradients_after_calls_without() -> None:
    blocks = rainfusion_blocks(RainFusionLayout(232, ((40, (6, 8, 4)),)), 32, CPU)
    query, key, value = waves(232)
    with torch.inference_mode():
        rainfusion_attention(TorchExecutor(), query, key, value, blocks, 0.5, SCALE)
    query = query.clone().requires_grad_()
    rainfusion_attention(TorchExecutor(), query, key, value, blocks, 0.5, SCALE).sum().backward()
    assert query.grad is not None and bool(query.grad.isfinite().all())


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.sampled_from([4, 16, 32]),
)
@settings(max_examples=80)
def test_protected_blocks_are_those_of_the_rows_in_them(
    grids: list[tuple[int, int, int]], context: list[int], block: int
) -> None:
    spans: list[tuple[int, tuple[int, int, int]]] = []
    end, video = 0, set[int]()
    for grid, rows in zip(grids, context, strict=False):
        start = end + rows
        end = start + prod(grid)
        spans.append((start, grid))
        video |= set(range(start, end))
    layout = RainFusionLayout(end + context[-1], tuple(spans))
    if layout.missing_rows(block):
        return
    order = rainfusion_order(layout, block).tolist()
    assert sorted(order) == list(range(layout.used_len))
    blocks = [order[at : at + block] for at in range(0, len(order), block)]
    starts = [order.index(start) // block for start, _ in spans]
    expected = {n for n, rows in enumerate(blocks) if any(row not in video for row in rows)}
    for (_, grid), start in zip(spans, starts, strict=True):
        expected |= set(range(start, start - (-grid[1] * grid[2] // block)))
    assert protected_blocks(layout, block) == expected
