"""A record of the whole sequence as one call of the local impl sees it: some of its queries, keys and heads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from omni_attn.backends.metadata import AttentionMetadata, PackedPadding
from omni_attn.errors import MetadataError
from omni_attn.parallel.shards import Span, count_tokens, count_within

OWN = "own"
"""Name of the layer's impl, and of a strategy's only call."""

_KEY_FIELDS = frozenset({"attn_mask", "kv_lengths", "cu_seqlens_q", "packed_padding"})


class View(NamedTuple):
    """What a call of the local impl is prepared for: a record, (query tokens, key tokens), and the impl's name."""

    record: AttentionMetadata
    lengths: tuple[int, int]
    impl: str = OWN

    @property
    def on_host(self) -> tuple[object, ...]:
        """All that a builder may refuse it for: what is known without asking a device."""
        record, mask = self.record, self.record.attn_mask
        boundaries = (_known(record.cu_seqlens_q), _known(record.cu_seqlens_k))
        shape = None if mask is None else mask.shape
        stated = (shape, record.hides_nothing, record.kv_lengths, record.packed_padding)
        return (self.impl, self.lengths, *stated, *boundaries)


def places(span: Span, joint: int, order: str, total: int, *, with_joint: bool = True) -> tuple[Span, ...]:
    """Where tokens of a span of the split sequence, and joint ones beside it, lie in the whole of both.

    Args:
        span: tokens of the sequence that is split.
        joint: tokens of the joint stream; 0 = there is none.
        order: "front" or "rear".
        total: tokens of the sequence that is split.
        with_joint: whether the call has the joint tokens too.
    """
    if order == "rear":
        own, beside = span, (total, total + joint)
    else:
        own, beside = (joint + span[0], joint + span[1]), (0, joint)
    return tuple(sorted((own, beside))) if joint and with_joint else (own,)


def view_record(
    record: AttentionMetadata,
    lengths: tuple[int, int],
    *,
    query: tuple[Span, ...] | None = None,
    key: tuple[Span, ...] | None = None,
    heads: Span | None = None,
) -> View:
    """The record as a call sees it that has these places of the whole sequence's queries and keys, and these heads.

    Args:
        record: of the whole.
        lengths: (query tokens, key tokens) of the whole.
        query, key, heads: None = all of them.

    Raises:
        MetadataError: a mask does not fit `lengths`, or packed sequences would have to be put together anew.
    """
    queries, keys = query or ((0, lengths[0]),), key or ((0, lengths[1]),)
    changes: dict[str, object] = {"joint_tokens": (0, 0), "layer_inputs": {}}
    if queries != ((0, lengths[0]),) or keys != ((0, lengths[1]),):
        changes |= {"vsa_dit_seq_shape": None, "video_layout": None}
        changes |= _packing(record, queries, keys)
    if record.attn_mask is not None:
        changes["attn_mask"] = _mask(record.attn_mask, lengths, queries, keys, heads)
    if record.kv_lengths is not None:
        changes["kv_lengths"] = (
            tuple(count_within(keys, length) for length in record.kv_lengths) if _ascend(keys) else None
        )
    return View(replace(record, **changes), (count_tokens(queries), count_tokens(keys)))  # type: ignore[arg-type]


def in_key_order(record: AttentionMetadata, lengths: tuple[int, int], *, causal: bool) -> AttentionMetadata:
    """The record with joint keys where the impl gets them: those of a causal layer in front, see join_streams.

    Args:
        record: of the whole; lengths: (query tokens, key tokens) of the whole, joint ones among them.

    Raises:
        MetadataError: a causal layer has more queries than keys of its own beside joint ones; see also view_record.
    """
    joint = record.joint_tokens[1]
    if not causal or not joint:
        return record
    _check_all_seen(record, lengths)
    if record.joint_order == "front":
        return record
    own = lengths[1] - joint
    if record.stated & _KEY_FIELDS:
        record = view_record(record, lengths, key=((own, lengths[1]), (0, own))).record
    return replace(record, joint_tokens=(0, joint), joint_order="front")


def _check_all_seen(record: AttentionMetadata, lengths: tuple[int, int]) -> None:
    """Joint keys are seen by every query: the triangle, which ends with the last key, may not reach into them."""
    padding, joint = record.packed_padding, record.joint_tokens[1]
    queries, keys = lengths if padding is None else (padding.q_length, padding.kv_length)
    if record.cu_seqlens_q is None and queries > keys - joint:
        raise MetadataError(
            f"{joint} joint keys in a causal layer are seen by all queries, and {queries} queries over {keys - joint} "
            "other keys would hide some of them: give at least as many keys as queries, or state the order as "
            "attn_mask in a layer that is not causal"
        )


def _mask(
    mask: Tensor,
    lengths: tuple[int, int],
    queries: tuple[Span, ...],
    keys: tuple[Span, ...],
    heads: Span | None,
) -> Tensor:
    whole = (lengths[1],) if mask.dim() == 2 else lengths
    if tuple(mask.shape[-len(whole) :]) != whole:
        raise MetadataError(
            f"attn_mask has shape {tuple(mask.shape)}, and this call gets a part of it: it needs to be that of the "
            f"whole sequence, {lengths[0]} query and {lengths[1]} key tokens, on every rank"
        )
    mask = _select(mask, -1, keys)
    if mask.dim() == 4:
        mask = _select(mask, 2, queries)
        if heads is not None and mask.shape[1] > 1:
            mask = mask[:, heads[0] : heads[1]]
    return mask


def _select(tensor: Tensor, dim: int, spans: tuple[Span, ...]) -> Tensor:
    parts = [tensor.narrow(dim, start, end - start) for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _packing(
    record: AttentionMetadata, queries: tuple[Span, ...], keys: tuple[Span, ...]
) -> dict[str, object]:
    padding, first = record.packed_padding, record.cu_seqlens_q
    if padding is not None:
        if not (_ascend(queries) and _ascend(keys)):
            raise MetadataError(
                "packed_padding with causal joint streams behind the sequence, whose order the split changes: put the "
                'joint streams in front, joint_order="front"'
            )
        used = (count_within(queries, padding.q_length), count_within(keys, padding.kv_length))
        return {"packed_padding": PackedPadding(*used)}
    if first is None:
        return {}
    if len(queries) > 1 or len(keys) > 1:
        raise MetadataError(
            "packed sequences (cu_seqlens_q) beside joint streams cannot be split over ranks in this way: use "
            "ulysses_degree alone"
        )
    second = first if record.cu_seqlens_k is None else record.cu_seqlens_k
    (span_q,), (span_k,) = queries, keys
    changes: dict[str, object] = {
        "cu_seqlens_q": _within(first, span_q),
        "cu_seqlens_k": _within(second, span_k),
    }
    for name, span in (("max_seqlen_q", span_q), ("max_seqlen_k", span_k)):
        longest = getattr(record, name)
        changes[name] = None if longest is None else min(longest, span[1] - span[0])
    return changes


def _within(boundaries: Tensor | tuple[int, ...], span: Span) -> Tensor | tuple[int, ...]:
    """Boundaries of the sequences' parts in a span, counted from its start; a sequence outside of it is empty."""
    start, end = span
    if isinstance(boundaries, Tensor):
        return (boundaries - start).clamp(0, end - start)
    return tuple(min(max(boundary - start, 0), end - start) for boundary in boundaries)


def _known(boundaries: Tensor | tuple[int, ...] | None) -> tuple[int, ...] | None:
    if isinstance(boundaries, Tensor):
        return tuple(boundaries.tolist()) if boundaries.device.type == "cpu" else None
    return boundaries


def _ascend(spans: tuple[Span, ...]) -> bool:
    return all(first[1] <= second[0] for first, second in pairwise(spans))
