"""Where decodes end, and an order of requests that moves few of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.backends.paged_split import reorder_decodes_first, split_decodes_and_prefills
from omni_attn.errors import MetadataError
from tests.kv_cache.counted import make_common


def step(query_lens: list[int], padded_tokens: int = 0, **changes: Any) -> CommonAttentionMetadata:
    made = make_common([(q, q + 3) for q in query_lens], slot_mapping=None, **changes)
    return made.replace(num_actual_tokens=made.num_actual_tokens + padded_tokens)


@pytest.mark.parametrize(
    ("lengths", "threshold", "uniform", "padded", "wanted"),
    [
        ([1, 1, 1], 1, False, 0, (3, 0, 3, 0)),
        ([1, 1, 1], 1, True, 0, (3, 0, 3, 0)),
        ([2, 1, 3, 4, 5, 6, 7, 8], 4, False, 0, (4, 4, 10, 26)),
        ([2, 2, 1, 3, 2, 1, 2], 3, True, 0, (2, 5, 4, 9)),
        ([2, 1, 2, 4, 5, 6, 7, 8], 4, True, 0, (1, 7, 2, 33)),
        ([2, 2, 2, 0], 3, True, 2, (4, 0, 8, 0)),
        ([5, 1, 1], 1, False, 0, (0, 3, 0, 7)),
        ([5, 5], 4, True, 0, (0, 2, 0, 10)),
        ([1, 1, 0, 9, 1], 1, False, 0, (3, 2, 2, 10)),  # a decode behind a prefill is served with it
        ([1, 1, 0, 0], 1, False, 6, (4, 0, 8, 0)),
        ([1, 7, 0], 1, False, 2, (1, 2, 1, 9)),
        ([0, 2, 2], 3, True, 0, (3, 0, 4, 0)),  # padding in front says nothing about the rest
        ([0, 5, 5], 3, True, 0, (1, 2, 0, 10)),
        ([0, 0], 1, False, 4, (2, 0, 4, 0)),
    ],
)
def test_where_decodes_end(
    lengths: list[int], threshold: int, uniform: bool, padded: int, wanted: tuple[int, ...]
) -> None:
    assert split_decodes_and_prefills(step(lengths, padded), threshold, require_uniform=uniform) == wanted


@pytest.mark.parametrize(
    ("lengths", "prefilling", "uniform", "wanted"),
    [
        ([1, 1], [False, True], True, (1, 1, 1, 1)),
        ([1, 1], [False, True], False, (1, 1, 1, 1)),
        ([1, 1], [True, False], False, (0, 2, 0, 2)),
        ([1, 1], [False, False], False, (2, 0, 2, 0)),
        ([1, 0], [False, True], False, (2, 0, 1, 0)),  # what an earlier step left in a padded row
    ],
)
def test_short_extends_told_apart(
    lengths: list[int], prefilling: list[bool], uniform: bool, wanted: tuple[int, ...]
) -> None:
    common = step(lengths, is_prefilling=torch.tensor(prefilling))
    assert (
        split_decodes_and_prefills(common, require_uniform=uniform, treat_short_extends_as_decodes=False)
        == wanted
    )


def test_short_extends_that_nobody_names() -> None:
    with pytest.raises(MetadataError, match=r"state is_prefilling, bool \[2\]"):
        split_decodes_and_prefills(step([1, 1]), treat_short_extends_as_decodes=False)


def test_no_requests_at_all() -> None:
    nothing = CommonAttentionMetadata(
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        query_start_loc_cpu=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        num_reqs=0,
        num_actual_tokens=4,
        max_query_len=0,
        max_seq_len=0,
        block_table=torch.zeros(0, 1, dtype=torch.int32),
    )
    for uniform in (False, True):
        assert split_decodes_and_prefills(nothing, 2, require_uniform=uniform) == (0, 0, 4, 0)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 3), st.booleans()
)
def test_both_sides_make_up_the_step(lengths: list[int], threshold: int, padded: int, uniform: bool) -> None:
    common = step(lengths, padded)
    split = split_decodes_and_prefills(common, threshold, require_uniform=uniform)
    assert split.num_decodes + split.num_prefills == len(lengths)
    assert split.num_decode_tokens + split.num_prefill_tokens == common.num_actual_tokens
    decodes = lengths[: split.num_decodes]
    assert all(length <= threshold for length in decodes)
    assert not uniform or len(set(decodes) - {0}) <= 1
    if split.num_prefills:
        assert sum(decodes) == split.num_decode_tokens


@pytest.mark.parametrize(
    ("queries", "earlier", "prefilling", "wanted"),
    [
        ([100, 1, 200, 1], [0, 5, 0, 5], [True, False, True, False], [3, 1, 2, 0]),
        ([1, 1, 9], [3, 3, 0], [False, False, True], [0, 1, 2]),
        ([9, 9, 1, 1, 1], [0, 4, 4, 4, 0], [True, True, True, False, True], [3, 2, 1, 0, 4]),
        ([], [], [], []),
    ],
)
def test_an_order_that_moves_few(
    queries: list[int], earlier: list[int], prefilling: list[bool], wanted: list[int]
) -> None:
    assert reorder_decodes_first(queries, earlier, prefilling) == wanted


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.booleans()), max_size=9), st.integers(1, 3)
)
def test_an_ordered_batch_splits_at_its_decodes(rows: list[tuple[int, int, bool]], threshold: int) -> None:
    order = reorder_decodes_first(*([row[i] for row in rows] for i in range(3)), threshold)  # type: ignore[arg-type]
    assert sorted(order) == list(range(len(rows)))

    def is_decode(row: tuple[int, int, bool]) -> bool:
        return row[0] <= threshold and row[1] > 0 and not row[2]

    decodes = sum(map(is_decode, rows))
    assert all(is_decode(rows[old]) for old in order[:decodes])
    again = [rows[old] for old in order]
    assert reorder_decodes_first(*([row[i] for row in again] for i in range(3)), threshold) == list(  # type: ignore[arg-type]
        range(len(rows))
    )
