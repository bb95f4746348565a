"""What a record states about masks and packing, checked once and in one form for all dense backends."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.ops.layout import INT32_MAX
from omni_attn.ops.segments import Segment

#: The fields that `read_record` looks at: what a builder that calls it declares in `reads`.
DENSE_FIELDS = frozenset(
    {"attn_mask", "mask_mode", "kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    | {"packed_padding", "validate"}
)


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences packed on the device: int32 boundaries [N + 1], and the longest sequence of each side."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, eq=False)
class Stated:
    """At most one of the three is set; none = plain dense attention.

    Attributes:
        mask: checked mask: bool [B, Sk] where mask_kind is "padding", else [B|1, H|1, Sq, Sk] bool or float.
        segments: parts known on the host; rows of no part give zeros.
        packed: parts known only on the device.
    """

    mask: torch.Tensor | None = None
    mask_kind: Literal["none", "padding", "arbitrary"] = "none"
    segments: tuple[Segment, ...] | None = None
    packed: Packed | None = None


def read_record(record: AttentionMetadata, lengths: tuple[int, int]) -> Stated:
    """The record's masks and packing for calls of `lengths` = (query tokens, key tokens).

    Raises:
        MetadataError: shapes do not fit the lengths, a mask is of a kind nobody defines, or host facts and mask
            disagree; both numbers are named.
    """
    mask = _checked_mask(record, lengths)
    if 0 in lengths:
        return Stated(segments=())  # nothing to attend to, or from: the output is zeros, or empty
    if record.packed_padding is not None:
        padding = record.packed_padding
        _within("packed_padding.q_length", padding.q_length, lengths[0], "query")
        _within("packed_padding.kv_length", padding.kv_length, lengths[1], "key")
        _agree(record, mask, (padding.kv_length,), "packed_padding.kv_length")
        return Stated(segments=(Segment(0, padding.q_length, 0, padding.kv_length),))
    if record.cu_seqlens_q is not None:
        return _read_packed(record, mask, lengths)
    if mask is None:
        return Stated()
    if record.kv_lengths is not None:
        _agree(record, mask, record.kv_lengths, "kv_lengths")
    if mask.dim() == 2 and mask.dtype == torch.bool:
        return Stated(mask=mask, mask_kind="padding")
    return Stated(mask=mask[:, None, None] if mask.dim() == 2 else mask, mask_kind="arbitrary")


def check_token_count(label: str, tokens: int) -> None:
    """Holds the tokens of a packed call against the int32 boundaries that kernels take.

    Args:
        label: the backend, for the error text.

    Raises:
        MetadataError: there are more than int32 counts.
    """
    if tokens > INT32_MAX:
        raise MetadataError(
            f"{label} counts packed tokens in int32, up to {INT32_MAX}: this call has {tokens}. Split the batch, or "
            "choose TORCH_SDPA or CUDNN_ATTN for this role"
        )


def _checked_mask(record: AttentionMetadata, lengths: tuple[int, int]) -> torch.Tensor | None:
    mask = record.attn_mask
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise MetadataError(
            f"attn_mask has dtype {mask.dtype}: a bool mask keeps where True, a float mask is added, and an integer "
            "mask could mean either. Convert it, for example with mask.bool()"
        )
    if mask.dim() == 2:
        wanted: tuple[int, ...] = (mask.shape[0], lengths[1])
        meaning = "[B, K]"
    elif mask.dim() == 4:
        wanted = (*mask.shape[:2], *lengths)
        meaning = "[B|1, H|1, Sq, Sk]"
    else:
        raise MetadataError(
            f"attn_mask has {mask.dim()} dimensions {tuple(mask.shape)}: needs [B, K] or [B|1, H|1, Sq, Sk]"
        )
    if tuple(mask.shape) != wanted:
        raise MetadataError(
            f"attn_mask has shape {tuple(mask.shape)}, the call has {lengths[0]} query and {lengths[1]} key tokens: "
            f"needs {meaning} = {wanted}"
        )
    if record.mask_mode == "padding" and not (mask.dim() == 2 and mask.dtype == torch.bool):
        raise MetadataError(
            f"mask_mode='padding' needs a bool mask [B, K], found {mask.dtype} {tuple(mask.shape)}"
        )
    return None if record.hides_nothing else mask


def _read_packed(record: AttentionMetadata, mask: torch.Tensor | None, lengths: tuple[int, int]) -> Stated:
    cu_q, cu_k = record.cu_seqlens_q, record.cu_seqlens_k
    cu_k = cu_q if cu_k is None else cu_k
    host_q, host_k = _on_host(cu_q), _on_host(cu_k)
    if host_q is not None and host_k is not None:
        documents = _documents(host_q, host_k, lengths)
        _longest("max_seqlen_q", record.max_seqlen_q, [d.query_end - d.query_start for d in documents])
        _longest("max_seqlen_k", record.max_seqlen_k, [d.key_end - d.key_start for d in documents])
        if mask is not None:
            documents = _masked_documents(record, mask, host_k, documents)
        return Stated(segments=documents)
    if mask is not None:
        raise MetadataError(
            "attn_mask beside cu_seqlens that only the device knows: give cu_seqlens as a tuple of ints, or drop the "
            "mask and let cu_seqlens state the padding"
        )
    if not (isinstance(cu_q, torch.Tensor) and isinstance(cu_k, torch.Tensor)):
        raise MetadataError("cu_seqlens_q and cu_seqlens_k: needs both as tensors or both as tuples of ints")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu.dim() != 1 or cu.dtype != torch.int32:
            raise MetadataError(
                f"{name} has dtype {cu.dtype} and shape {tuple(cu.shape)}: needs int32 [N + 1]"
            )
    if cu_q.shape != cu_k.shape:
        raise MetadataError(
            f"cu_seqlens_q and cu_seqlens_k bound {len(cu_q) - 1} and {len(cu_k) - 1} sequences: needs the same number"
        )
    return Stated(
        packed=Packed(cu_q, cu_k, record.max_seqlen_q or lengths[0], record.max_seqlen_k or lengths[1])
    )


def _on_host(boundaries: torch.Tensor | tuple[int, ...] | None) -> tuple[int, ...] | None:
    if isinstance(boundaries, torch.Tensor):
        if boundaries.dtype not in (torch.int32, torch.int64):
            raise MetadataError(f"cu_seqlens has dtype {boundaries.dtype}: needs int32 [N + 1]")
        return tuple(boundaries.tolist()) if boundaries.device.type == "cpu" else None
    return None if boundaries is None else tuple(boundaries)


def _documents(cu_q: tuple[int, ...], cu_k: tuple[int, ...], lengths: tuple[int, int]) -> tuple[Segment, ...]:
    if len(cu_q) != len(cu_k):
        raise MetadataError(
            f"cu_seqlens_q and cu_seqlens_k bound {len(cu_q) - 1} and {len(cu_k) - 1} sequences: needs the same number"
        )
    for name, cu, total in (("cu_seqlens_q", cu_q, lengths[0]), ("cu_seqlens_k", cu_k, lengths[1])):
        if len(cu) < 2 or cu[0] != 0 or any(b < a for a, b in pairwise(cu)):
            raise MetadataError(f"{name}={cu}: needs boundaries that start at 0 and do not decrease")
        _within(f"{name}[-1]", cu[-1], total, "query" if name.endswith("q") else "key")
    return tuple(Segment(*q, *k) for q, k in zip(pairwise(cu_q), pairwise(cu_k), strict=True))


def _longest(name: str, stated: int | None, found: list[int]) -> None:
    if stated is not None and max(found, default=0) > stated:
        raise MetadataError(
            f"{name}={stated}, the longest packed sequence has {max(found)} tokens: make them agree"
        )


def _masked_documents(
    record: AttentionMetadata, mask: torch.Tensor, cu_k: tuple[int, ...], documents: tuple[Segment, ...]
) -> tuple[Segment, ...]:
    """The documents that a prefix mask keeps; the mask has to end where a document ends."""
    if record.kv_lengths is not None and len(record.kv_lengths) == 1:
        kept = record.kv_lengths[0]
    elif mask.device.type == "cpu" and mask.dim() == 2 and mask.dtype == torch.bool and mask.shape[0] == 1:
        kept = int(mask.sum())
    else:
        raise MetadataError(
            "attn_mask beside cu_seqlens: needs a bool mask [1, K], and kv_lengths if it is on a GPU"
        )
    _agree(record, mask, (kept,), "kv_lengths")
    if kept not in cu_k:
        raise MetadataError(
            f"attn_mask keeps {kept} keys, cu_seqlens_k has boundaries {cu_k}: no sequence ends at {kept}. "
            "Make mask and boundaries agree, or drop the mask"
        )
    return tuple(document for document in documents if document.key_end <= kept)


def _agree(record: AttentionMetadata, mask: torch.Tensor | None, kept: tuple[int, ...], name: str) -> None:
    """Holds a padding mask against host facts: by shape, and by value where looking is free or was asked for."""
    if mask is None:
        return
    if mask.dim() != 2 or mask.dtype != torch.bool or len(kept) != mask.shape[0]:
        raise MetadataError(
            f"{name}={kept} beside attn_mask: needs a bool mask [B, K] with one length per item, found {mask.dtype} "
            f"{tuple(mask.shape)}"
        )
    for count in kept:
        _within(name, count, mask.shape[1], "key")
    if mask.device.type != "cpu" and record.validate != "values":
        return
    found = tuple(mask.sum(-1).tolist())
    if found != kept:
        raise MetadataError(
            f"attn_mask keeps {_brief(found)} keys, {name} says {_brief(kept)}: make them agree"
        )
    for item, count in enumerate(kept):
        if not bool(mask[item, :count].all()):
            raise MetadataError(
                f"attn_mask of item {item} has a hole among its first {count} keys, {name} states a prefix: drop "
                f"{name}, and use a backend that takes arbitrary masks (TORCH_SDPA, CUDNN_ATTN)"
            )


def _brief(counts: tuple[int, ...]) -> str:
    return str(counts[0]) if len(counts) == 1 else str(counts)


def _within(name: str, value: int, total: int, side: str) -> None:
    if not 0 <= value <= total:
        raise MetadataError(f"{name}={value}, the call has {total} {side} tokens: needs 0 to {total}")
