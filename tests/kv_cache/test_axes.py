"""Steps are padded, unpadded and cut along the axes that their fields name: field by field, a model's own too."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.backends.paged_axes import along
from omni_attn.backends.paged_split import split_decodes_and_prefills
from omni_attn.errors import MetadataError
from omni_attn.kv_cache.build import contents_key
from tests.kv_cache.counted import make_common

LENGTHS = [(2, 5), (0, 3), (3, 3)]


@dataclass(frozen=True, eq=False, kw_only=True)
class FilmMetadata(CommonAttentionMetadata):
    """What a video model adds: one field of each kind, and one that holds for all requests."""

    frame: torch.Tensor = field(metadata=along("tokens", dim=1, fill=-7))
    texts: tuple[str, ...] = field(metadata=along("requests"))
    chunk_starts: list[int] = field(metadata=along("boundaries"))
    guidance: float = 5.0


def film(**changes: Any) -> FilmMetadata:
    own = {
        "frame": torch.arange(15).view(3, 5),
        "texts": ("a", "b", "c"),
        "chunk_starts": [0, 1, 2, 3],
        "is_prefilling": torch.tensor([True, False, True]),
        "causal": torch.tensor([1, 0, 1], dtype=torch.int32),
    }
    made = make_common(LENGTHS, kind=FilmMetadata, **own | changes)
    assert isinstance(made, FilmMetadata)
    return made


def plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


PADDED = {
    "query_start_loc": [0, 2, 2, 5, 5, 5],
    "query_start_loc_cpu": [0, 2, 2, 5, 5, 5],
    "seq_lens": [5, 3, 3, 0, 0],
    "seq_lens_cpu": [5, 3, 3, 0, 0],
    "num_reqs": 5,
    "num_actual_tokens": 7,
    "max_query_len": 3,
    "max_seq_len": 5,
    "block_table": [[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]],
    "slot_mapping": [7, 8, 20, 21, 22, -1, -1],
    "causal": [1, 0, 1, 1, 1],
    "is_prefilling": [True, False, True, False, False],
    "frame": [[0, 1, 2, 3, 4, -7, -7], [5, 6, 7, 8, 9, -7, -7], [10, 11, 12, 13, 14, -7, -7]],
    "texts": ("a", "b", "c", 0, 0),
    "chunk_starts": [0, 1, 2, 3, 3, 3],
    "guidance": 5.0,
}
BEHIND = {  # requests 1 and 2
    "query_start_loc": [0, 0, 3],
    "query_start_loc_cpu": [0, 0, 3],
    "seq_lens": [3, 3],
    "seq_lens_cpu": [3, 3],
    "num_reqs": 2,
    "num_actual_tokens": 3,
    "max_query_len": 3,
    "max_seq_len": 3,
    "block_table": [[3, 4], [5, 6]],
    "slot_mapping": [20, 21, 22],
    "causal": [0, 1],
    "is_prefilling": [False, True],
    "frame": [[2, 3, 4], [7, 8, 9], [12, 13, 14]],
    "texts": ("b", "c"),
    "chunk_starts": [1, 2, 3],
    "guidance": 5.0,
}


def test_every_field_is_in_the_tables() -> None:
    names = {spec.name for spec in fields(FilmMetadata)}
    assert names == set(PADDED) == set(BEHIND)


@pytest.mark.parametrize("name", sorted(PADDED))
def test_a_field_padded(name: str) -> None:
    padded = film().padded(5, 7)
    assert type(padded) is FilmMetadata
    found, before = getattr(padded, name), getattr(film(), name)
    assert plain(found) == PADDED[name]
    assert not isinstance(found, torch.Tensor) or found.dtype == before.dtype


@pytest.mark.parametrize("name", sorted(PADDED))
def test_a_field_unpadded(name: str) -> None:
    assert plain(getattr(film().padded(5, 7).unpadded(3, 5), name)) == plain(getattr(film(), name))


@pytest.mark.parametrize("name", sorted(BEHIND))
def test_a_field_of_some_requests(name: str) -> None:
    cut = film().sliced((1, 3))
    assert type(cut) is FilmMetadata
    assert plain(getattr(cut, name)) == BEHIND[name]


@pytest.mark.parametrize("name", sorted(PADDED))
def test_a_field_replaced(name: str) -> None:
    """All others stay; the step itself does not change."""
    step = film()
    later = step.replace(guidance=1.0)
    assert type(later) is FilmMetadata and step.guidance == 5.0
    assert name == "guidance" or getattr(later, name) is getattr(step, name)


def test_what_is_not_stated_stays_so() -> None:
    step = make_common(LENGTHS, slot_mapping=None, seq_lens_cpu=None, causal=True)
    for other in (step.padded(4, 9), step.sliced((0, 2)), step.padded(4, 9).unpadded(3, 5)):
        assert (other.slot_mapping, other.seq_lens_cpu, other.is_prefilling, other.causal) == (
            None,
            None,
            None,
            True,
        )
        assert other.max_seq_len == 5


def test_tokens_cut_within_requests() -> None:
    """The first goes on from its earlier tokens, the last forgets its later ones, and counts no longer to the bound."""
    step = make_common([(4, 9), (2, 2), (5, 12)], causal=True)
    part = step.sliced((0, 3), (3, 9))
    assert part.query_start_loc.tolist() == part.query_start_loc_cpu.tolist() == [0, 1, 3, 6]
    assert part.seq_lens.tolist() == [9, 2, 10] and part.max_seq_len == 10 and part.max_query_len == 3
    assert step.slot_mapping is not None and part.slot_mapping is not None
    assert part.slot_mapping.tolist() == step.slot_mapping.tolist()[3:9]
    assert step.seq_lens.tolist() == [9, 2, 12], "the step itself stays"
    middle = step.sliced((2, 3), (7, 10))
    assert middle.query_start_loc.tolist() == [0, 3] and middle.seq_lens.tolist() == [11]


def test_padding_goes_with_the_last_requests() -> None:
    step = make_common(LENGTHS).padded(4, 9)
    assert step.sliced((2, 4)).num_actual_tokens == 7
    assert step.sliced((0, 1)).num_actual_tokens == 2


def test_nothing_looks_at_the_device() -> None:
    """On the meta device there is nothing to see: a look at a value raises."""
    step = film(causal=True)
    there = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "frame")
    step = step.replace(**{name: getattr(step, name).to("meta") for name in there})
    part = step.padded(5, 9).unpadded(4, 8).sliced((0, 3), (1, 4))
    assert part.seq_lens.device.type == "meta" and part.slot_mapping is not None
    assert part.slot_mapping.shape == (3,) and part.query_start_loc_cpu.tolist() == [0, 1, 1, 3]
    assert split_decodes_and_prefills(part, 1) == (2, 1, 1, 2)
    assert contents_key(part) == contents_key(part) != contents_key(step)


@pytest.mark.parametrize(
    ("requests", "tokens", "words"),
    [
        ((0, 4), None, "requests 0 to 4 of a step with 3"),
        ((2, 2), None, "at least one"),
        ((0, 1), (0, 4), "tokens 0 to 4 do not begin in request 0 and end in request 0"),
        ((1, 3), (0, 5), "tokens 0 to 5 do not begin in request 1"),
        ((0, 3), (0, 4), "request 2 would be cut 1 tokens before its end"),
    ],
)
def test_cuts_that_cannot_be(requests: tuple[int, int], tokens: tuple[int, int] | None, words: str) -> None:
    with pytest.raises(MetadataError, match=words):
        make_common(LENGTHS).sliced(requests, tokens)


def test_sizes_that_do_not_fit() -> None:
    step = make_common(LENGTHS)
    with pytest.raises(MetadataError, match="padding to 2 requests and 9 tokens: the step has 3 and 5"):
        step.padded(2, 9)
    with pytest.raises(MetadataError, match="taking 4 requests and 5 tokens: the step has only 3"):
        step.unpadded(4, 5)
    with pytest.raises(MetadataError, match="2 requests with 2 tokens, and 5 tokens: the step has 5"):
        step.unpadded(2, 5)
    with pytest.raises(MetadataError, match="4 tokens: the step has 5"):
        step.unpadded(3, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_lens": torch.zeros(2, dtype=torch.int32)}, "seq_lens has 2 rows, and num_reqs=3 needs 3"),
        ({"seq_lens_cpu": torch.zeros(4, dtype=torch.int32)}, "seq_lens_cpu has 4 rows"),
        ({"is_prefilling": torch.zeros(2, dtype=torch.bool)}, "is_prefilling has 2 rows"),
        (
            {"block_table": torch.zeros(3, 2, dtype=torch.int64)},
            "block_table is torch.int64: needs torch.int32",
        ),
        ({"slot_mapping": torch.arange(6)}, "slot_mapping has 6 slots, and the step num_actual_tokens=5"),
        ({"query_start_loc": torch.zeros(3, dtype=torch.int32)}, "query_start_loc has 3 rows"),
        ({"causal": torch.ones(3, dtype=torch.bool)}, r"needs torch.int32 \[3\]"),
        (
            {"slot_mapping": torch.zeros(5, dtype=torch.int32)},
            "slot_mapping is torch.int32: needs torch.int64",
        ),
    ],
)
def test_steps_that_contradict_themselves(changes: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(MetadataError, match=words):
        make_common(LENGTHS, **changes)


def test_an_axis_that_is_none() -> None:
    with pytest.raises(ValueError, match="'requests', 'boundaries' or 'tokens'"):
        along("frames")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="texts lies along the requests and is a dict"):
        film(texts={}).padded(4, 9)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=5), st.data())
def test_parts_make_up_the_whole(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    """Cut anywhere between two tokens of causal attention, each token meets the same keys as before."""
    step = make_common([(new, max(1, new + earlier)) for new, earlier in lengths], causal=True)
    starts = step.query_start_loc_cpu.tolist()
    if starts[-1] < 2:
        return
    cut = data.draw(st.integers(1, starts[-1] - 1))
    last = next(row for row in range(step.num_reqs) if starts[row] < cut <= starts[row + 1])
    first = next(row for row in range(step.num_reqs) if starts[row] <= cut < starts[row + 1])
    front = step.sliced((0, last + 1), (0, cut))
    back = step.sliced((first, step.num_reqs), (cut, starts[-1]))

    def keys_of_each_token(part: CommonAttentionMetadata) -> list[int]:
        ends, lens = part.query_start_loc.tolist(), part.seq_lens.tolist()
        return [
            lens[row] - (ends[row + 1] - 1 - token)
            for row in range(part.num_reqs)
            for token in range(ends[row], ends[row + 1])
        ]

    assert keys_of_each_token(front) + keys_of_each_token(back) == keys_of_each_token(step)
