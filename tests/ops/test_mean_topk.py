"""How many blocks are kept, and which."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.selectors import blocks_kept, mean_topk
from tests.ops.executors import CoarseStage, random_examples
from tests.ops.vsa_oracle import budget, highest

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("sparsity", "blocks", "kept"),
    [
        (0.7, 10, 4),  # 1 - 0.7 is a little more than 0.3 in float64
        (0.9, 10, 1),  # and 1 - 0.9 a little less than 0.1
        (0.8, 5, 1),
        (0.5, 5, 3),
        (0.0, 1, 1),
        (0.0, 624, 624),
        (1.0, 624, 1),
        (1.0, 1, 1),
        (0.999, 10, 1),
        (1e-9, 10, 10),
    ],
)
def test_blocks_kept(sparsity: float, blocks: int, kept: int) -> None:
    assert blocks_kept(sparsity, blocks) == kept


@given(st.floats(0, 1), st.integers(1, 5000))
@example(0.1 + 0.2, 10)
def test_blocks_kept_is_the_float_expression(sparsity: float, blocks: int) -> None:
    kept = blocks_kept(sparsity, blocks)
    assert type(kept) is int and kept == budget(sparsity, blocks)


def rows_of(selected: SelectedBlocks) -> list[list[int]]:
    """Selected blocks of each row; every row is checked to be a proper one."""
    assert selected.indices.dtype == selected.counts.dtype == torch.int32
    assert selected.indices.is_contiguous() and selected.counts.is_contiguous()
    assert selected.indices.shape[:-1] == selected.counts.shape
    rows = []
    for row, count in zip(
        selected.indices.flatten(0, -2).tolist(), selected.counts.flatten().tolist(), strict=True
    ):
        rows.append(row[:count])
        assert rows[-1] == sorted(set(rows[-1])), "ascending, each once"
    return rows


def select(
    stage: CoarseStage, *rows: list[float], topk: int, dtype: torch.dtype = torch.float32
) -> list[list[int]]:
    return rows_of(stage.select(torch.tensor([[rows]], dtype=dtype, device=stage.device), topk))


@pytest.mark.parametrize(("blocks", "topk"), [(1, 1), (7, 1), (7, 3), (7, 7), (624, 125), (1440, 144)])
def test_full_ties_give_exactly_the_first_blocks(stage: CoarseStage, blocks: int, topk: int) -> None:
    for dtype in stage.dtypes:
        for score in (0.3, -0.3, 0.0):
            scores = torch.full((2, 1, 3, blocks), score, dtype=dtype, device=stage.device)
            assert rows_of(stage.select(scores, topk)) == [list(range(topk))] * 6


def test_ties_at_the_threshold_go_to_the_lowest_block(stage: CoarseStage) -> None:
    assert select(stage, [1, 2, 0, 2, 1, 1], topk=3) == [[0, 1, 3]]
    assert select(stage, [0, 1, 1, 5, 1], topk=2) == [[1, 3]]
    assert select(stage, [-5, -1, -1, -4, -1], topk=2) == [[1, 2]]


def test_rounded_scores_still_give_exact_counts(stage: CoarseStage) -> None:
    """bfloat16 leaves few different values among many blocks."""
    scores = torch.randn(1, 2, 20, 600, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    expected = [highest(row, 75) for row in scores.flatten(0, 2).tolist()]
    assert rows_of(stage.select(scores.to(stage.device), 75)) == expected


def test_both_zeros_are_equal(stage: CoarseStage) -> None:
    assert select(stage, [-0.0, 0.0, -0.0, 0.0], topk=2) == [[0, 1]]
    assert select(stage, [0.0, -0.0, -1.0, 0.0], [-1.0, -0.0, 0.0, 0.0], topk=2) == [[0, 1], [1, 2]]


def test_extreme_scores(stage: CoarseStage) -> None:
    small, huge = 2e-38, 3.4e38
    assert select(stage, [0.0, small, -small, 0.0], topk=1) == [[1]]
    assert select(stage, [huge, -huge, INF, huge, -INF], topk=3) == [[0, 2, 3]]
    assert select(stage, [-INF, -INF, -INF, -INF], topk=2) == [[0, 1]]
    assert select(stage, [-INF, -INF, -huge, -INF], topk=2) == [[0, 2]]
    assert select(stage, [INF, INF, INF], topk=2) == [[0, 1]]


def test_neighbouring_floats_are_told_apart(stage: CoarseStage) -> None:
    for dtype in stage.dtypes:
        step = torch.finfo(dtype).eps
        assert select(stage, [1, 1 + step, 1 - step], [-1, -1 - step, -1], topk=1, dtype=dtype) == [[1], [0]]


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_rows_with_nan_are_never_short(stage: CoarseStage, topk: int) -> None:
    broken = [[NAN] * 4, [-NAN] * 4, [NAN, 1.0, NAN, 2.0], [-INF, NAN, INF, 0.0]]
    rows = select(stage, *broken, [1.0, 2.0, 3.0, 4.0], topk=topk)
    assert [len(row) for row in rows] == [topk] * 5
    assert all(0 <= block < 4 for row in rows for block in row)
    assert rows[4] == [0, 1, 2, 3][-topk:], "a neighbour of broken rows"


values = st.sampled_from([-INF, -3e38, -1.0, -2e-38, -0.0, 0.0, 2e-38, 0.5, 1.0, 3e38, INF])


@random_examples
@given(st.lists(st.lists(values, min_size=9, max_size=9), min_size=1, max_size=4), st.integers(1, 9))
def test_any_scores_with_many_ties(stage: CoarseStage, rows: list[list[float]], topk: int) -> None:
    assert select(stage, *rows, topk=topk) == [highest(row, topk) for row in rows]


def test_permuted_batch_and_heads_permute_the_selection(stage: CoarseStage) -> None:
    scores = torch.randint(0, 6, (3, 4, 1, 30), generator=torch.Generator().manual_seed(1)).float()
    scores = scores.to(stage.device)
    plain = stage.select(scores, 7).indices[..., :7]
    batch, heads = torch.tensor([2, 0, 1]), torch.tensor([3, 1, 0, 2])
    assert torch.equal(stage.select(scores[batch], 7).indices[..., :7], plain[batch])
    assert torch.equal(stage.select(scores[:, heads].contiguous(), 7).indices[..., :7], plain[:, heads])


def test_strided_scores_are_taken_and_left_alone(stage: CoarseStage) -> None:
    scores = torch.randint(0, 6, (2, 2, 30, 3), generator=torch.Generator().manual_seed(2)).float()
    scores = scores.to(stage.device)
    view, before = scores.permute(0, 3, 1, 2), scores.clone()
    assert rows_of(stage.select(view, 7)) == rows_of(stage.select(view.contiguous(), 7))
    assert torch.equal(scores, before)


def test_scores_in_half_precision(stage: CoarseStage) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert select(stage, [1, -3, 2, 2, 0.5], [0, 0, 0, 0, -1], topk=2, dtype=dtype) == [[2, 3], [0, 1]]


def test_selection_has_no_gradient() -> None:
    selected = mean_topk(torch.randn(1, 1, 2, 6, requires_grad=True), 2)
    assert not selected.indices.requires_grad and not selected.counts.requires_grad


def test_more_blocks_than_there_are_is_all_of_them() -> None:
    selected = mean_topk(torch.randn(1, 1, 2, 6), 9)
    assert selected.indices.tolist() == [[[[*range(6)]] * 2]] and selected.counts.tolist() == [[[6, 6]]]
