"""AttentionMetadata and what it is made of: frozen, and refused where fields contradict one another."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from omni_attn import AttentionMetadata, PackedPadding, VideoLayout
from omni_attn.errors import MetadataError
from tests.layer.stands import HEAD_SIZE, Stand, every_stand, refusal_of, tensors

KEEP = torch.tensor([[True, True, True, False]])


def test_nothing_is_stated_by_an_empty_record() -> None:
    assert AttentionMetadata().stated == frozenset()
    record = AttentionMetadata(cu_seqlens_q=(0, 0), step=0, sigma=0.0, max_seqlen_q=0)
    assert record.stated == {"cu_seqlens_q", "step", "sigma", "max_seqlen_q"}
    with pytest.raises(MetadataError, match="max_seqlen_k"):
        AttentionMetadata(max_seqlen_k=4)


def test_records_are_frozen_and_compare_by_identity() -> None:
    record = AttentionMetadata(attn_mask=KEEP)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.attn_mask = None
    assert record != AttentionMetadata(attn_mask=KEEP) and record == record  # no comparison of tensors
    assert len({record, record}) == 1


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        AttentionMetadata(KEEP)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"mask_mode": "sometimes"}, ["mask_mode", "sometimes", "padding", "arbitrary"]),
        ({"kv_lengths": (3,)}, ["kv_lengths", "attn_mask"]),
        ({"cu_seqlens_k": (0, 4)}, ["cu_seqlens_k", "cu_seqlens_q"]),
        (
            {"cu_seqlens_q": (0, 4), "packed_padding": PackedPadding(3, 4)},
            ["cu_seqlens_q", "packed_padding"],
        ),
        ({"validate": "all"}, ["validate", "all", "shapes", "values"]),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(MetadataError) as raised:
        AttentionMetadata(**fields)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("prefix", "spans", "used"),
    [((3, 2), ((1, 2, 2),), 9), ((), ((2, 3, 4), (1, 3, 4)), 36), ((5,), (), 5), ((), (), 0)],
)
def test_a_video_layout_adds_up(prefix: Any, spans: Any, used: int) -> None:
    assert VideoLayout(prefix, spans, used).used_len == used
    with pytest.raises(MetadataError) as raised:
        VideoLayout(prefix, spans, used + 1)
    assert str(used) in str(raised.value) and str(used + 1) in str(raised.value)


def test_a_step_keeps_everything_else() -> None:
    grid = (1, 2, 3)
    record = AttentionMetadata(attn_mask=KEEP, vsa_dit_seq_shape=grid, num_steps=8)
    later = record.at_step(3, sigma=0.25)
    assert (later.step, later.num_steps, later.sigma) == (3, 8, 0.25)
    assert later.attn_mask is KEEP and later.vsa_dit_seq_shape == grid
    assert later.at_step(4, num_steps=9).num_steps == 9
    assert record.step is None and record.sigma is None


MASKS: list[tuple[dict[str, Any], list[str]]] = [
    ({"attn_mask": torch.ones(1, 4, dtype=torch.uint8)}, ["attn_mask", "uint8"]),
    ({"attn_mask": torch.ones(1, 4, dtype=torch.int64)}, ["attn_mask", "int64"]),
    ({"attn_mask": torch.ones(1, 3, 4, dtype=torch.bool)}, ["attn_mask", "(1, 3, 4)"]),
    ({"attn_mask": torch.ones(4, dtype=torch.bool)}, ["attn_mask", "(4,)"]),
    ({"attn_mask": KEEP[:, :3]}, ["attn_mask", "(1, 3)", "4"]),
    ({"attn_mask": torch.zeros(1, 1, 2, 4, dtype=torch.bool)}, ["attn_mask", "(1, 1, 2, 4)", "3"]),
    ({"attn_mask": torch.zeros(1, 1, 3, 1, dtype=torch.bool)}, ["attn_mask", "(1, 1, 3, 1)", "4"]),
    ({"attn_mask": KEEP[:, None, None].expand(1, 1, 3, 4), "mask_mode": "padding"}, ["mask_mode"]),
    ({"attn_mask": KEEP, "kv_lengths": (2,)}, ["kv_lengths", "3", "2"]),
    ({"attn_mask": KEEP.flip(-1), "kv_lengths": (3,)}, ["kv_lengths", "hole"]),
    ({"cu_seqlens_q": (0, 2, 3), "cu_seqlens_k": (0, 4)}, ["cu_seqlens_q", "cu_seqlens_k", "2", "1"]),
    ({"cu_seqlens_q": (0, 5), "cu_seqlens_k": (0, 4)}, ["cu_seqlens_q", "5", "3"]),
    ({"cu_seqlens_q": (0, 3), "cu_seqlens_k": (0, 6)}, ["cu_seqlens_k", "6", "4"]),
    ({"cu_seqlens_q": (1, 3), "cu_seqlens_k": (0, 4)}, ["cu_seqlens_q", "(1, 3)"]),
    ({"cu_seqlens_q": (0, 2, 1, 3), "cu_seqlens_k": (0, 1, 2, 4)}, ["cu_seqlens_q", "(0, 2, 1, 3)"]),
    ({"cu_seqlens_q": (0,), "cu_seqlens_k": (0,)}, ["cu_seqlens_q", "(0,)"]),
    ({"cu_seqlens_q": (0, 2, 3), "cu_seqlens_k": (0, 4, 4), "max_seqlen_q": 1}, ["max_seqlen_q=1", "2"]),
    ({"cu_seqlens_q": (0, 2, 3), "cu_seqlens_k": (0, 1, 4), "max_seqlen_k": 2}, ["max_seqlen_k=2", "3"]),
    (
        {"cu_seqlens_q": torch.tensor([0, 3]).int(), "cu_seqlens_k": (0, 4), "max_seqlen_q": 2},
        ["max_seqlen_q=2", "3"],
    ),
    ({"packed_padding": PackedPadding(5, 4)}, ["q_length", "5", "3"]),
    ({"packed_padding": PackedPadding(3, 6)}, ["kv_length", "6", "4"]),
    ({"packed_padding": PackedPadding(-1, 4)}, ["q_length", "-1"]),
    ({"packed_padding": PackedPadding(3, 2), "attn_mask": KEEP}, ["kv_length", "3", "2"]),
    ({"cu_seqlens_q": (0, 3), "cu_seqlens_k": (0, 4), "attn_mask": KEEP}, ["cu_seqlens_k", "3"]),
]


@every_stand
@pytest.mark.parametrize(
    ("fields", "parts"), MASKS, ids=lambda value: "" if isinstance(value, list) else None
)
def test_a_record_that_does_not_fit_the_call(stand: Stand, fields: dict[str, Any], parts: list[str]) -> None:
    """3 query and 4 key tokens; the same refusal on each backend, naming the field and both numbers."""
    call, record = tensors(1, 3, 4), AttentionMetadata(**fields)
    with stand.kernels() as log:
        layer = stand.layer(4, HEAD_SIZE)
        text = refusal_of(lambda: layer(*(x.to(stand.dtype) for x in call), record))
        assert not log.calls
    assert '"self"' in text and stand.name in text
    if not stand.limits(*call, record).told_by(text):
        assert all(part in text for part in parts), text
