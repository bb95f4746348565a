"""Mask tensors against loops over single query-key pairs."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_attn.ops.masks import (
    as_additive,
    combine_masks,
    document_mask,
    lift_hidden_rows,
    position_mask,
    rows_without_key,
)

sides = st.integers(-1, 4)
windows = st.none() | st.tuples(sides, sides)
INF = float("-inf")


def sees(distance: int, causal: bool, window: tuple[int, int] | None) -> bool:
    """Whether a query sees the key that lies `distance` tokens behind its own position."""
    left, right = window or (-1, -1)
    return (
        (not causal or distance <= 0)
        and (left == -1 or distance >= -left)
        and (right == -1 or distance <= right)
    )


@settings(max_examples=150, deadline=None)
@given(queries=st.integers(0, 8), keys=st.integers(0, 8), causal=st.booleans(), window=windows)
def test_position_mask(queries: int, keys: int, causal: bool, window: tuple[int, int] | None) -> None:
    mask = position_mask(queries, keys, causal=causal, window=window)
    assert mask.shape == (queries, keys) and mask.dtype == torch.bool
    expected = [[sees(j - (i + keys - queries), causal, window) for j in range(keys)] for i in range(queries)]
    assert mask.tolist() == expected


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Boundaries of query and key sequences, empty ones among them, and unused tokens behind each side."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
    boundaries = [list(accumulate(side, initial=0)) for side in zip(*lengths, strict=True)]
    return boundaries[0], boundaries[1], draw(st.integers(0, 3)), draw(st.integers(0, 3))


@settings(max_examples=200, deadline=None)
@given(packing=packings(), causal=st.booleans(), window=windows)
def test_document_mask(
    packing: tuple[list[int], list[int], int, int], causal: bool, window: tuple[int, int] | None
) -> None:
    cu_q, cu_k, unused_q, unused_k = packing
    lengths = (cu_q[-1] + unused_q, cu_k[-1] + unused_k)
    boundaries = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))
    mask = document_mask(*boundaries, lengths, causal=causal, window=window)
    expected = torch.zeros(lengths, dtype=torch.bool)
    for i in range(cu_q[-1]):
        document = bisect_right(cu_q, i) - 1
        (q0, q1), (k0, k1) = (cu[document : document + 2] for cu in (cu_q, cu_k))
        for j in range(k0, k1):
            position = (i - q0) + (k1 - k0) - (q1 - q0)  # aligned at the end of its own sequence
            expected[i, j] = sees((j - k0) - position, causal, window)
    assert torch.equal(mask, expected)


@settings(max_examples=60, deadline=None)
@given(packing=packings())
def test_tokens_behind_the_last_boundary_see_nothing_and_are_not_seen(
    packing: tuple[list[int], list[int], int, int],
) -> None:
    cu_q, cu_k, unused_q, unused_k = packing
    lengths = (cu_q[-1] + unused_q, cu_k[-1] + unused_k)
    mask = document_mask(torch.tensor(cu_q).int(), torch.tensor(cu_k).int(), lengths)
    assert not mask[cu_q[-1] :].any() and not mask[:, cu_k[-1] :].any()


def test_combining_hides_what_either_hides() -> None:
    keep = torch.tensor([[True, False, True], [True, True, False]])
    causal = position_mask(2, 3, causal=True, window=None)
    assert combine_masks(keep, causal).tolist() == [[True, False, False], [True, True, False]]
    bias = torch.tensor([[0.5, INF, 1.0], [0.0, 2.0, 3.0]])
    assert combine_masks(bias, causal).tolist() == [[0.5, INF, INF], [0.0, 2.0, 3.0]]
    assert bias[0, 2] == 1.0, "the mask itself is not modified"


def test_rows_without_key() -> None:
    keep = torch.tensor([[[[True, False], [False, False]]]])
    assert rows_without_key(keep).tolist() == [[[[False], [True]]]]
    bias = torch.tensor([[[[0.0, INF], [INF, INF], [torch.finfo(torch.float32).min] * 2]]])
    assert rows_without_key(bias).tolist() == [[[[False], [True], [False]]]]


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_masks_keep_their_meaning_in_another_dtype(source: torch.dtype, target: torch.dtype) -> None:
    lowest = torch.finfo(source).min
    mask = torch.tensor([INF, lowest, -1.5, 0.0, 2.0], dtype=source)
    converted = as_additive(mask, target)
    assert converted.dtype == target
    # -inf hides; every finite number stays a number, however large
    assert converted[0] == INF and bool(converted[1:].isfinite().all())
    assert converted[1] <= torch.finfo(target).min / 2 or lowest > torch.finfo(target).min
    assert converted[2:].tolist() == [-1.5, 0.0, 2.0]
    assert mask[1] == lowest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lifted_rows_mean_the_same(dtype: torch.dtype) -> None:
    """By a softmax in float64 over scores that a huge number absorbs and a large one does not."""
    scores = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    lowest = torch.finfo(dtype).min / 2
    rows = [
        [0.0, -1.5, INF],
        [lowest] * 3,
        [-3e7, -3e7, lowest],
        [-1e30, -1e31, -1e30],
        [INF] * 3,
        [2e3, 0.0, 1.0],
    ]
    bias = torch.tensor(rows, dtype=dtype)
    lifted, shift = lift_hidden_rows(bias)
    assert lifted.dtype == dtype and bool((lifted.amax(-1)[:4] >= -(2.0**56)).all())
    for row, (before, after) in enumerate(zip(bias, lifted, strict=True)):
        if row == 4:
            assert bool((after == INF).all()) and shift[row] == 0
            continue
        expected = torch.softmax(scores + before.double(), dim=-1)
        # the way a kernel adds: in float32
        found = torch.softmax(scores.float() + after.float(), dim=-1)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
        assert row in (0, 5) or shift[row] < -1e6
    assert torch.equal(lifted[[0, 5]], bias[[0, 5]])


def test_lifting_looks_at_the_keys_that_can_be_seen() -> None:
    bias = torch.tensor([[-1e30, 0.0], [0.0, 0.0]])
    lifted, shift = lift_hidden_rows(bias, torch.ones(2, 2, dtype=torch.bool).tril())
    assert lifted[0, 0] == -(2.0**56) and shift[0].item() == pytest.approx(-1e30)
