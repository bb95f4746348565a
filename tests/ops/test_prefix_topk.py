"""A prefix that all rows keep and whose rows keep all: every implementation against a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.executors import CoarseStage, random_examples
from tests.ops.prefix_oracle import selection_of

INF, NAN = math.inf, math.nan


def rows_of(
    stage: CoarseStage, scores: torch.Tensor, prefix: int, topk: int, compete: bool
) -> list[list[int]]:
    """Kept blocks of each row; the lists are checked to be proper ones."""
    indices, counts = stage.prefix_select(scores.to(stage.device), prefix, topk, compete=compete)
    assert indices.dtype == counts.dtype == torch.int32 and indices.shape[:-1] == counts.shape
    assert indices.is_contiguous() and counts.is_contiguous()
    has_prefix_rows = scores.shape[-2] == scores.shape[-1] and prefix
    assert indices.shape[-1] == (scores.shape[-1] if has_prefix_rows else prefix + topk)
    rows = []
    for row, count in zip(indices.flatten(0, -2).tolist(), counts.flatten().tolist(), strict=True):
        rows.append(row[:count])
        assert rows[-1] == sorted(set(rows[-1])) and set(row[count:]) <= {-1}
    return rows


values = st.sampled_from([-INF, -3e38, -1.0, -2e-38, -0.0, 0.0, 2e-38, 0.5, 1.0, 3e38, INF, NAN])


@random_examples
@given(st.data())
def test_any_scores(stage: CoarseStage, data: st.DataObject) -> None:
    """With ties, and with rows that cannot be ranked: those take the first blocks of what they choose from."""
    draw = data.draw
    blocks = draw(st.integers(2, 8))
    prefix = draw(st.integers(0, blocks - 2))
    topk = draw(st.integers(1, blocks - prefix - 1))
    compete, video_alone = draw(st.booleans()), draw(st.booleans())
    scores = torch.tensor(draw(st.lists(values, min_size=blocks**2, max_size=blocks**2))).view(
        1, 1, blocks, -1
    )
    ranked = scores[..., 0 if compete else prefix :]
    plain = scores.clone()
    plain[~ranked.isfinite().all(-1)] = 0.0
    expected = selection_of(plain, prefix, topk, compete=compete)[0][0]
    if video_alone:
        scores, expected = scores[:, :, prefix:], expected[prefix:]
    assert rows_of(stage, scores, prefix, topk, compete) == [list(row) for row in expected]


@pytest.mark.parametrize("compete", [False, True])
@pytest.mark.parametrize(("prefix", "topk", "blocks"), [(12, 7, 30), (590, 4, 600), (500, 13, 520)])
def test_rounded_scores(stage: CoarseStage, prefix: int, topk: int, blocks: int, compete: bool) -> None:
    """Equals lie at the threshold of rows of any length."""
    video = blocks - prefix
    scores = torch.randn(1, 2, video, blocks, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    found = rows_of(stage, scores, prefix, topk, compete)
    square = torch.cat([torch.zeros(1, 2, prefix, blocks), scores], dim=2)
    expected = selection_of(square, prefix, topk, compete=compete)[0]
    assert found == [list(row) for head in expected for row in head[prefix:]]


def test_strided_scores_are_taken_and_left_alone(stage: CoarseStage) -> None:
    scores = torch.randn(1, 2, 9, 9, generator=torch.Generator().manual_seed(1))
    view, before = scores[:, :, 3:], scores.clone()
    assert rows_of(stage, view, 3, 2, False) == rows_of(stage, view.contiguous(), 3, 2, False)
    turned = scores.transpose(2, 3)
    assert rows_of(stage, turned, 3, 2, True) == rows_of(stage, turned.contiguous(), 3, 2, True)
    assert torch.equal(scores, before)
