"""attend_segments: parts of one sequence, each by itself."""

from __future__ import annotations

import pytest
import torch

from omni_attn.ops.reference import reference_attention
from omni_attn.ops.segments import Segment, attend_segments
from tests.layer.stands import HEAD_SIZE, tensors


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return reference_attention(query, key, value)[0].to(query.dtype)


def test_each_segment_sees_its_own_keys() -> None:
    query, key, value = tensors(2, 7, 9, kv_heads=2)
    segments = (Segment(0, 3, 0, 4), Segment(3, 7, 4, 9))
    output = attend_segments(attend, query, key, value, segments)
    for a, b, c, d in segments:
        assert torch.equal(output[:, a:b], attend(query[:, a:b], key[:, c:d], value[:, c:d]))


@pytest.mark.parametrize(
    "segments",
    [
        (),
        (Segment(0, 3, 0, 0),),  # queries without a key
        (Segment(0, 0, 0, 5),),  # keys without a query
        (Segment(2, 2, 3, 3),),
    ],
)
def test_nothing_to_attend_to_gives_zeros_and_calls_nothing(segments: tuple[Segment, ...]) -> None:
    def never(*_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("called for nothing")

    output = attend_segments(never, *tensors(2, 3, 5), segments)
    assert output.shape == (2, 3, 4, HEAD_SIZE) and not output.any()


def test_rows_of_no_segment_are_zeros_whatever_they_hold() -> None:
    query, key, value = tensors(1, 6, 6)
    for tensor in (query, key, value):
        tensor[:, 4:] = float("nan")
    output = attend_segments(attend, query, key, value, (Segment(0, 4, 0, 4),))
    assert torch.equal(output[:, :4], attend(query[:, :4], key[:, :4], value[:, :4]))
    assert not output[:, 4:].any()


def test_output_has_the_values_head_size_and_the_querys_dtype() -> None:
    query, key, value = (x.bfloat16() for x in tensors(1, 4, 4))
    wide = torch.cat([value, value], dim=-1)
    output = attend_segments(attend, query, key, wide, (Segment(0, 4, 0, 4),))
    assert (
        output.shape == (1, 4, 4, 2 * HEAD_SIZE) and output.dtype == torch.bfloat16 and output.is_contiguous()
    )


def test_inputs_are_left_alone() -> None:
    given = tensors(1, 4, 4)
    before = [x.clone() for x in given]
    attend_segments(attend, *given, (Segment(0, 2, 0, 2), Segment(2, 4, 2, 4)))
    for now, then in zip(given, before, strict=True):
        assert torch.equal(now, then)


def test_one_segment_over_all_rows_is_not_copied() -> None:
    """A padded prompt: the output is what `attend` gave, without zeros written and overwritten."""
    query, key, value = tensors(1, 6, 9)
    made: list[torch.Tensor] = []

    def kept(*parts: torch.Tensor) -> torch.Tensor:
        made.append(attend(*parts))
        return made[-1]

    output = attend_segments(kept, query, key, value, (Segment(0, 6, 0, 7),))
    assert output is made[0]
    assert torch.equal(output, attend(query, key[:, :7], value[:, :7]))
