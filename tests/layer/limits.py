"""What the facts of a backend refuse in one call, and the words that such a refusal owes to the person.

The evaluator judges geometry and lengths, as it does at selection; facts on masks and packing judge records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.facts import AttentionRequest, DeviceInfo, KernelFacts, evaluate

#: The backend that takes every mask, which a refusal of one has to recommend.
MASK_CAPABLE = "TORCH_SDPA"

Words = tuple[str, ...]
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_NOWHERE = DeviceInfo(kind="any", name="any")
_ANYWHERE: dict[str, Any] = {
    **dict.fromkeys(("device_kinds", "architectures"), frozenset()),
    **dict.fromkeys(("capabilities", "cudnn", "packages"), ()),
}
_PARTS = frozenset({"cu_seqlens_q", "packed_padding"})


@dataclass(frozen=True)
class Limits:
    """Refusals of one call: those that have to come, and those that a backend is free to give.

    Each is the words that its text holds; where several apply, a backend may name any one of them.
    """

    must: tuple[Words, ...] = ()
    may: tuple[Words, ...] = ()

    def told_by(self, text: str) -> bool:
        """Whether a text tells one of them."""
        return any(all(word in text for word in words) for words in (*self.must, *self.may))


def limits_of(
    facts: KernelFacts, call: Call, record: AttentionMetadata | None = None, **geometry: Any
) -> Limits:
    """What the facts say about a call of query [B, Sq, H, D], key [B, Sk, G, D], value [B, Sk, G, Dv] and a record."""
    record = record or AttentionMetadata()
    lengths, causal = (call[0].shape[1], call[1].shape[1]), bool(geometry.get("causal"))
    must = [(reason,) for reason in _of_geometry(facts, call, geometry)]
    may = list(_of_parts(facts, record, lengths, causal))
    (may if record.stated & _PARTS else must).extend(length_limits(facts, lengths, causal))
    (may if _tells_the_host(record) else must).extend(_of_mask(facts, record, causal))
    served = _PARTS if facts.packing else {"packed_padding"} if facts.packed_padding else set()
    must += [(name,) for name in (record.stated & _PARTS) - served]
    return Limits(tuple(must), tuple(may))


def length_limits(
    facts: KernelFacts, lengths: tuple[int | None, int | None], causal: bool = False
) -> Iterator[Words]:
    """Refusals of a number of query and key tokens, None = unknown; where there are none nobody needs a kernel."""
    if 0 in lengths:
        return
    needs = {"num_heads": 1, "head_size": -1, "causal": causal and facts.causal}
    unhinted = set(_reasons(facts, **needs))
    for reason in _reasons(facts, max_seqlen_q=lengths[0], max_seqlen_k=lengths[1], **needs):
        if reason not in unhinted:
            names = (word for word in ("causal", "query tokens", "key tokens") if word in reason)
            yield *re.findall(r"\d+", reason), *names


def _reasons(facts: KernelFacts, **needs: Any) -> tuple[str, ...]:
    """What the evaluator says, machine and packages left out."""
    request = AttentionRequest(role="self", **{"video_grid": True, **needs})
    return evaluate(replace(facts, **_ANYWHERE), request, _NOWHERE)


def _of_geometry(facts: KernelFacts, call: Call, geometry: dict[str, Any]) -> tuple[str, ...]:
    query, key, value = call
    shapes = {
        "num_heads": query.shape[2],
        "num_kv_heads": key.shape[2],
        "head_size": query.shape[3],
        "value_head_size": value.shape[3],
    }
    return _reasons(facts, **{**shapes, **geometry})


def _tells_the_host(record: AttentionMetadata) -> bool:
    """Whether lengths stand beside a mask, which may spare a kernel the mask."""
    return bool(record.stated & {"kv_lengths", *_PARTS})


def _of_mask(facts: KernelFacts, record: AttentionMetadata, causal: bool) -> Iterator[Words]:
    mask = record.attn_mask
    if mask is None or record.hides_nothing:
        return
    is_bool = mask.dtype == torch.bool
    kind = "padding" if mask.dim() == 2 and is_bool else "arbitrary"
    by_head = mask.dim() == 4 and mask.shape[1] > 1
    if (
        kind not in facts.mask_kinds
        or not (is_bool or facts.float_masks)
        or (by_head and not facts.head_masks)
    ):
        yield "attn_mask", MASK_CAPABLE
    if causal and not facts.causal_with_mask:
        yield "causal", MASK_CAPABLE


def _of_parts(
    facts: KernelFacts, record: AttentionMetadata, lengths: tuple[int, int], causal: bool
) -> Iterator[Words]:
    """Parts of a call, or what a mask leaves of it, may be too short for a kernel where the call itself is not.

    Only some backends hand parts to their kernel, and boundaries on the device tell nobody how long they are.
    """
    for part in _parts(record, lengths):
        if min(part) > 0:
            yield from length_limits(facts, part, causal)
    limited = not facts.device_boundaries or any(length_limits(facts, (1, 2), causal))
    if isinstance(record.cu_seqlens_q, torch.Tensor) and limited:
        yield ("cu_seqlens",)


def _parts(record: AttentionMetadata, lengths: tuple[int, int]) -> Iterator[tuple[int, int]]:
    for kept in record.kv_lengths or ():
        yield lengths[0], kept
    if record.packed_padding is not None:
        yield record.packed_padding.q_length, record.packed_padding.kv_length
    if record.cu_seqlens_q is not None:
        sides = (
            record.cu_seqlens_q,
            record.cu_seqlens_q if record.cu_seqlens_k is None else record.cu_seqlens_k,
        )
        ends = (side.flatten().tolist() if isinstance(side, torch.Tensor) else side for side in sides)
        counts = ([end - start for start, end in pairwise(side)] for side in ends)
        yield from zip(*counts, strict=False)
    mask = record.attn_mask
    if mask is not None and mask.device.type == "cpu" and mask.dim() == 2:
        yield from ((lengths[0], int(keys)) for keys in (mask != 0).sum(-1))
