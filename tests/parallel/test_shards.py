"""Shards and heads: every token and every head has one place, and queries stay with their keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_attn.errors import ConfigError
from omni_attn.parallel import Shards
from omni_attn.parallel.heads import split_heads
from omni_attn.parallel.shards import count_within

counts = st.integers(0, 40)
ranks_of = st.integers(1, 9)
spans = st.tuples(counts, counts).map(lambda pair: (min(pair), max(pair)))


@given(counts, ranks_of)
def test_even_pieces_are_the_whole_in_order(total: int, ranks: int) -> None:
    shards = Shards.even(total, ranks)
    assert [token for start, end in shards.spans for token in range(start, end)] == list(range(total))
    assert len(shards.sizes) == ranks and shards.total == total
    assert max(shards.sizes) - min(shards.sizes) <= 1
    assert list(shards.sizes) == sorted(shards.sizes, reverse=True)


@given(st.lists(counts, min_size=1, max_size=4), st.integers(1, 4))
def test_neighbours_join_their_pieces(sizes: list[int], neighbours: int) -> None:
    shards = Shards(tuple(size for size in sizes for _ in range(neighbours)))
    joined = shards.joined(neighbours)
    assert joined.sizes == tuple(size * neighbours for size in sizes)
    assert [span[0] for span in joined.spans] == [span[0] for span in shards.spans[::neighbours]]


@given(st.lists(spans, max_size=4), counts)
def test_count_within_counts_the_first_tokens(places: list[tuple[int, int]], length: int) -> None:
    tokens = [token for span in places for token in range(*span)]
    assert count_within(places, length) == sum(token < length for token in tokens)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 16))
def test_every_head_once_and_queries_with_their_keys(kv_heads: int, ratio: int, ranks: int) -> None:
    heads = kv_heads * ratio
    split = split_heads(heads, kv_heads, ranks, role="self")
    query = [head for span in split.query for head in range(*span)]
    key = [head for span in split.key for head in range(*span)]
    assert query == list(range(heads))
    assert key == list(range(kv_heads * split.repeat))
    for rank in range(ranks):
        queries, keys = split.counts(rank)
        assert (queries == 0) == (keys == 0)
        if not keys:
            continue
        within = queries // keys
        assert within * keys == queries
        for place, head in enumerate(range(*split.query[rank])):
            repeated = split.key[rank][0] + place // within
            assert repeated // split.repeat == head // ratio


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 16))
def test_the_busiest_rank_has_no_more_than_an_even_split_needs(kv_heads: int, ratio: int, ranks: int) -> None:
    heads = kv_heads * ratio
    split = split_heads(heads, kv_heads, ranks, role="self")
    assert max(split.counts(rank)[0] for rank in range(ranks)) == -(-heads // ranks)


@pytest.mark.parametrize(
    ("heads", "ranks", "counts_of", "repeat"),
    [
        ((28, 7), 2, [(14, 7), (14, 7)], 2),
        ((8, 2), 2, [(4, 1), (4, 1)], 1),
        ((8, 2), 4, [(2, 1)] * 4, 2),
        ((5, 1), 2, [(3, 3), (2, 2)], 5),
        ((30, 30), 4, [(8, 8), (8, 8), (7, 7), (7, 7)], 1),
        ((2, 2), 3, [(1, 1), (1, 1), (0, 0)], 1),
    ],
)
def test_repeats_no_more_than_it_has_to(
    heads: tuple[int, int], ranks: int, counts_of: list[tuple[int, int]], repeat: int
) -> None:
    split = split_heads(*heads, ranks, role="self")
    assert [split.counts(rank) for rank in range(ranks)] == counts_of
    assert split.repeat == repeat


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 16))
def test_strict_splits_are_even_or_refused(kv_heads: int, ratio: int, ranks: int) -> None:
    heads = kv_heads * ratio
    if heads % ranks == 0 and kv_heads % ranks == 0:
        split = split_heads(heads, kv_heads, ranks, role="self", uneven="refuse")
        assert {split.counts(rank) for rank in range(ranks)} == {(heads // ranks, kv_heads // ranks)}
        assert split.repeat == 1
        return
    with pytest.raises(ConfigError) as raised:
        split_heads(heads, kv_heads, ranks, role="self", uneven="refuse")
    text = str(raised.value)
    assert all(f"{number} " in text for number in (heads, kv_heads, ranks))
    valid = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    assert f"one of {valid}" in text
