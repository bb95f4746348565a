"""From a record to the calls of TRTLLM_ATTN's kernels: padding cut off, sequences told apart, skipping decided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from omni_attn.backends.abstract import AttentionMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import DENSE_FIELDS, Packed, Stated, read_record
from omni_attn.backends.trtllm_facts import trtllm_variant
from omni_attn.backends.trtllm_kernels import Quantisation
from omni_attn.backends.trtllm_parts import Part, SkipRule, describe, document_parts, skip_rule, split
from omni_attn.errors import MetadataError
from omni_attn.facts.lengths import length_reasons
from omni_attn.ops.masks import behind_last

if TYPE_CHECKING:
    from omni_attn.config import AttentionSpec

_TAKES_MASKS = "Choose TORCH_SDPA or CUDNN_ATTN for this role, or add one as fallback"


def quantisation(spec: AttentionSpec | None) -> Quantisation | None:
    """How a spec wants its calls quantised, None = not at all."""
    if spec is None or spec.quant is None or spec.quant.dtype_qk is None:
        return None
    return Quantisation(spec.quant.dtype_qk, spec.quant.q_block_size, spec.quant.k_block_size)


@dataclass(frozen=True, eq=False)
class TrtllmMetadata:
    """M of TRTLLM_ATTN.

    Attributes:
        made_for: the variant whose limits the lengths were held against.
        whole: one call serves all rows.
        parts: several do, or not all rows; the rows of no part are zeros.
        packed: boundaries that only the device knows.
        unused_rows, unused_keys: True for packed tokens of no sequence, and for rows of one without keys, [1, T, 1, 1].
        factor: skip-softmax factor of the packed call.
        route: what runs, where it is not the ordinary kernel.
    """

    made_for: str
    whole: Part | None = None
    parts: tuple[Part, ...] = ()
    packed: Packed | None = None
    unused_rows: torch.Tensor | None = None
    unused_keys: torch.Tensor | None = None
    factor: float | None = None
    route: str | None = None


class TrtllmMetadataBuilder(AttentionMetadataBuilder):
    """Cuts padding off, tells sequences apart, and decides per step what is skipped."""

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self._skip = self.spec.skip_softmax if self.spec else None
        self._quant = quantisation(self.spec)
        self._kernel = trtllm_variant(self.variant)
        gated = (
            self._skip is not None and self._skip.threshold != 0 and self._skip.disabled_until_timestep > 0
        )
        self.reads = DENSE_FIELDS | {"sigma"} if gated else DENSE_FIELDS

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> TrtllmMetadata:
        """See AttentionMetadataBuilder.build.

        Raises:
            MetadataError: also for masks other than stated prefixes, and for lengths that the variant does not take.
        """
        stated = read_record(record, lengths)
        rule = skip_rule(self._skip, self.calibration, record)
        if stated.packed is not None:
            return self._build_packed(stated.packed, rule, lengths)
        if stated.segments is not None:
            self._check_lengths(
                (s.query_end - s.query_start, s.key_end - s.key_start) for s in stated.segments
            )
            parts = document_parts(stated.segments, rule, self._quant)
        elif stated.mask is not None:
            kept = self._prefixes(stated, record)
            self._check_lengths((lengths[0], keys) for keys in kept)
            items = (Part((0, lengths[0]), (0, keys), item) for item, keys in enumerate(kept) if keys)
            if len(kept) == 1:
                items = (replace(item, item=None) for item in items)
            parts = tuple(split(item, rule, self._quant) for item in items)
        else:
            self._check_lengths([lengths])
            parts = (split(Part((0, lengths[0]), (0, lengths[1])), rule, self._quant),)
        route = describe(parts, rule, self._quant)
        if len(parts) == 1 and parts[0].rows == (0, lengths[0]) and parts[0].item is None:
            return TrtllmMetadata(self._kernel.name, whole=parts[0], route=route)
        return TrtllmMetadata(self._kernel.name, parts=parts, route=route)

    def _check_lengths(self, lengths: Iterable[tuple[int, int]]) -> None:
        for pair in lengths:
            for reason in length_reasons(self._kernel.facts, *pair, causal=self.causal):
                raise MetadataError(
                    f"TRTLLM_ATTN ({self._kernel.name}) {reason}. Choose FLASH_ATTN or TORCH_SDPA for this role, or "
                    "add one as fallback"
                )

    def _prefixes(self, stated: Stated, record: AttentionMetadata) -> tuple[int, ...]:
        """Kept keys per item, where the host has stated them."""
        mask, kept = stated.mask, record.kv_lengths
        assert mask is not None
        if self.causal:
            raise MetadataError(f"TRTLLM_ATTN cannot take attn_mask together with causal. {_TAKES_MASKS}")
        if kept is None or stated.mask_kind != "padding":
            raise MetadataError(
                f"TRTLLM_ATTN cannot take attn_mask {tuple(mask.shape)} {mask.dtype}: its kernels have none. Padding "
                "behind the keys is served where the host states it: kv_lengths beside a bool mask [B, K], "
                f"packed_padding, or cu_seqlens. {_TAKES_MASKS}"
            )
        return kept

    def _build_packed(self, packed: Packed, rule: SkipRule, lengths: tuple[int, int]) -> TrtllmMetadata:
        needs = None
        if not self._kernel.facts.device_boundaries:
            needs = f"variant {self._kernel.name} asks the device in each call whether a sequence is empty"
        elif self._quant is not None:
            needs = "quant scales blocks of each sequence"
        elif rule.threshold is not None:
            needs = "skip_softmax.threshold is multiplied by the length of each sequence"
        elif packed.cu_seqlens_k is not packed.cu_seqlens_q and self.causal:
            needs = "causal attention needs equal query and key lengths"
        elif packed.cu_seqlens_k is not packed.cu_seqlens_q and not self._kernel.facts.unequal_lengths:
            needs = f"variant {self._kernel.name} needs equal query and key lengths"
        if needs is not None:
            raise MetadataError(
                f"TRTLLM_ATTN: {needs}, and these cu_seqlens are known to the device only: state cu_seqlens_q and "
                "cu_seqlens_k as tuples of ints"
            )
        whole = Part((0, lengths[0]), (0, lengths[1]), factor=rule.factor)
        return TrtllmMetadata(
            self._kernel.name,
            packed=packed,
            unused_rows=_rows_without_key(packed, lengths[0]),
            unused_keys=behind_last(packed.cu_seqlens_k, lengths[1]),
            factor=rule.factor,
            route=describe([whole], rule, None),
        )


def _rows_without_key(packed: Packed, length: int) -> torch.Tensor:
    """True for rows behind the last boundary, and for those of a sequence that has no keys."""
    cu_q, cu_k = packed.cu_seqlens_q, packed.cu_seqlens_k
    token = torch.arange(length, device=cu_q.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_q[1:].contiguous(), token, right=True).clamp(max=len(cu_q) - 2)
    no_keys = (cu_k[1:] == cu_k[:-1])[sequence]
    return (no_keys | (token >= cu_q[-1]))[None, :, None, None]
