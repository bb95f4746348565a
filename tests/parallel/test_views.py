"""A record as a part of its tokens sees it, held against the mask of the whole."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from omni_attn import AttentionMetadata
from omni_attn.backends.metadata import PackedPadding, VideoLayout
from omni_attn.backends.stated import read_record
from omni_attn.errors import MetadataError
from omni_attn.parallel import Shards
from omni_attn.parallel.shards import Span
from omni_attn.parallel.views import in_key_order, places, view_record

Order = Literal["front", "rear"]
orders = st.sampled_from(("front", "rear"))


def tokens_of(spans: tuple[Span, ...]) -> list[int]:
    return [token for span in spans for token in range(*span)]


@given(st.integers(0, 12), st.integers(1, 5), st.integers(0, 4), orders)
def test_places_are_those_of_the_joined_sequence(total: int, ranks: int, joint: int, order: Order) -> None:
    marks = [f"own {n}" for n in range(total)]
    streams = [f"joint {n}" for n in range(joint)]
    whole = streams + marks if order == "front" else marks + streams
    for span in Shards.even(total, ranks).spans:
        part = marks[slice(*span)]
        wanted = streams + part if order == "front" else part + streams
        assert [whole[n] for n in tokens_of(places(span, joint, order, total))] == wanted


@given(st.data(), orders)
def test_masks_keep_their_rows_and_columns(data: st.DataObject, order: Order) -> None:
    batch, heads, joint = data.draw(st.sampled_from([(1, 1, 0), (2, 1, 2), (1, 4, 1), (2, 4, 0)]))
    queries, keys = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    mask = torch.arange(batch * heads * (queries + joint) * (keys + joint), dtype=torch.float32)
    mask = mask.view(batch, heads, queries + joint, keys + joint)
    record = AttentionMetadata(attn_mask=mask, joint_tokens=(joint, joint), joint_order=order)
    span = data.draw(st.sampled_from(Shards.even(queries, 3).spans))
    key_span = data.draw(st.sampled_from(Shards.even(keys, 2).spans))
    query = places(span, joint, order, queries)
    key = places(key_span, joint, order, keys)
    lengths = (queries + joint, keys + joint)
    view = view_record(record, lengths, query=query, key=key, heads=(1, 3))
    wanted = mask[:, :, tokens_of(query)][..., tokens_of(key)]
    if heads > 1:
        wanted = wanted[:, 1:3]
    assert view.record.attn_mask is not None and torch.equal(view.record.attn_mask, wanted)
    assert view.lengths == (len(tokens_of(query)), len(tokens_of(key)))
    assert view.record.joint_tokens == (0, 0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 4), orders, st.integers(0, 3))
def test_kept_lengths_follow_a_prefix_mask(kept: list[int], ranks: int, order: Order, joint: int) -> None:
    own = 9 - joint
    mask = torch.arange(9) < torch.tensor(kept)[:, None]
    record = AttentionMetadata(attn_mask=mask, kv_lengths=tuple(kept), mask_mode="padding")
    for span in Shards.even(own, ranks).spans:
        view = view_record(record, (9, 9), key=places(span, joint, order, own)).record
        assert view.attn_mask is not None and view.kv_lengths == tuple(view.attn_mask.sum(-1).tolist())
        read_record(view, (9, view.attn_mask.shape[1]))  # it is a prefix still


def segments_as_mask(record: AttentionMetadata, lengths: tuple[int, int]) -> Tensor:
    """Which key each query sees, of what the host knows."""
    segments = read_record(record, lengths).segments
    assert segments is not None
    mask = torch.zeros(lengths, dtype=torch.bool)
    for segment in segments:
        mask[segment.query_start : segment.query_end, segment.key_start : segment.key_end] = True
    return mask


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2), st.booleans()
)
def test_packed_sequences_keep_their_parts(sizes: list[int], ranks: int, unused: int, on_host: bool) -> None:
    bounds = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
    total = int(bounds[-1]) + unused
    stated = tuple(bounds.tolist()) if on_host else bounds
    record = AttentionMetadata(cu_seqlens_q=stated, max_seqlen_q=max(sizes))
    whole = segments_as_mask(record, (total, total)) if total else torch.zeros(0, 0, dtype=torch.bool)
    for first in Shards.even(total, ranks).spans:
        for second in Shards.even(total, 2).spans:
            view = view_record(record, (total, total), query=(first,), key=(second,))
            if 0 in view.lengths:
                continue
            wanted = whole[slice(*first), slice(*second)]
            assert torch.equal(segments_as_mask(view.record, view.lengths), wanted)


@given(st.integers(0, 8), st.integers(0, 8), st.integers(1, 4), orders, st.integers(0, 3))
def test_structural_padding_keeps_its_part(
    used: int, used_keys: int, ranks: int, order: Order, joint: int
) -> None:
    record = AttentionMetadata(packed_padding=PackedPadding(used, used_keys))
    whole = segments_as_mask(record, (8, 8))
    for span in Shards.even(8 - joint, ranks).spans:
        spans = places(span, joint, order, 8 - joint)
        view = view_record(record, (8, 8), query=spans, key=spans)
        if 0 in view.lengths:
            continue
        tokens = tokens_of(spans)
        assert torch.equal(segments_as_mask(view.record, view.lengths), whole[tokens][:, tokens])


def test_a_view_of_all_of_it_keeps_grids() -> None:
    layout = VideoLayout(prefix_segments=(2,), spans=((1, 2, 2),), used_len=6)
    record = AttentionMetadata(vsa_dit_seq_shape=(1, 2, 3), video_layout=layout)
    kept = view_record(record, (6, 6), heads=(0, 1)).record
    assert (kept.vsa_dit_seq_shape, kept.video_layout) == ((1, 2, 3), layout)
    part = view_record(record, (6, 6), query=((0, 3),)).record
    assert (part.vsa_dit_seq_shape, part.video_layout) == (None, None)


@pytest.mark.parametrize("shape", [(2, 3), (1, 1, 2, 7), (1, 1, 7, 3)])
def test_a_mask_of_a_part_is_refused(shape: tuple[int, ...]) -> None:
    record = AttentionMetadata(attn_mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(MetadataError, match=r"whole sequence, 7 query and 7 key tokens"):
        view_record(record, (7, 7), query=((0, 3),))


def test_packed_sequences_beside_joint_streams_are_refused() -> None:
    record = AttentionMetadata(cu_seqlens_q=(0, 3, 7))
    with pytest.raises(MetadataError, match=r"cu_seqlens_q.*joint streams.*ulysses_degree"):
        view_record(record, (7, 7), query=((0, 2), (4, 7)))


# -- joint keys of causal layers, which are put in front


def test_joint_keys_of_a_causal_layer_come_first() -> None:
    mask = torch.arange(2 * 3 * 7, dtype=torch.float32).view(2, 1, 3, 7)
    record = AttentionMetadata(attn_mask=mask, joint_tokens=(0, 3), joint_order="rear")
    moved = in_key_order(record, (3, 7), causal=True)
    assert moved.attn_mask is not None
    assert torch.equal(moved.attn_mask, mask[..., [4, 5, 6, 0, 1, 2, 3]])
    assert (moved.joint_tokens, moved.joint_order) == ((0, 3), "front")


@pytest.mark.parametrize("order", ["front", "rear"])
def test_records_in_order_stay_as_they_are(order: Order) -> None:
    mask = torch.ones(1, 7, dtype=torch.bool)
    record = AttentionMetadata(attn_mask=mask, joint_tokens=(0, 3), joint_order=order)
    assert in_key_order(record, (4, 7), causal=False) is record
    assert in_key_order(AttentionMetadata(attn_mask=mask), (4, 7), causal=True).attn_mask is mask


def test_padding_behind_joint_keys_that_come_first_is_refused() -> None:
    record = AttentionMetadata(packed_padding=PackedPadding(3, 6), joint_tokens=(0, 3), joint_order="rear")
    with pytest.raises(MetadataError, match=r'packed_padding.*joint_order="front"'):
        in_key_order(record, (4, 7), causal=True)
