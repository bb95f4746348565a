"""From a record to M of FLASHINFER_ATTN: what the host knows is planned, the rest becomes a packed mask."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from omni_attn.backends.abstract import AttentionMetadataBuilder
from omni_attn.backends.flashinfer_masks import pack_mask
from omni_attn.backends.flashinfer_plans import Plan
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import DENSE_FIELDS, read_record
from omni_attn.errors import MetadataError
from omni_attn.ops.masks import behind_last, document_mask, position_mask, rows_without_key
from omni_attn.ops.segments import Segment

_ELSEWHERE = "choose TORCH_SDPA or CUDNN_ATTN for this role, or add one as fallback"


@dataclass(frozen=True, eq=False)
class FlashInferMetadata:
    """M of FLASHINFER_ATTN; as it is made without arguments, it stands for dense calls.

    Attributes:
        segments: sequences of a batch of one, behind one another; () = there is no token to attend to, or from.
        kv_lengths: valid keys of each item.
        packed_mask: uint8 [B|1, ceil(Sq * Sk / 8)]; empty_rows: True for query rows without a key, [B|1, Sq, 1, 1].
        unused_keys: True for packed key tokens behind the last boundary, [1, T, 1, 1]; they may hold NaN.
        plans: plans that calls have used, by (batch size, dtype, device); filled by the first call of each.
    """

    segments: tuple[Segment, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    packed_mask: torch.Tensor | None = None
    empty_rows: torch.Tensor | None = None
    unused_keys: torch.Tensor | None = None
    plans: dict[tuple[int, torch.dtype, torch.device], Plan] = field(default_factory=dict, repr=False)

    @property
    def without_lse(self) -> str | None:
        """Why there is no log-sum-exp of these calls; None where there is."""
        if self.packed_mask is None and not self.segments and not self.kv_lengths:
            return None
        return "FLASHINFER_ATTN gives none of masked or packed calls"


class FlashInferMetadataBuilder(AttentionMetadataBuilder):
    """Turns what the host knows into planned calls, and the rest into a mask where the variant takes one."""

    reads: frozenset[str] = DENSE_FIELDS

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> FlashInferMetadata:
        """See AttentionMetadataBuilder.build.

        Raises:
            MetadataError: also for float masks, masks that differ by head, and, on the variants without masks, for
                masks and boundaries that the host does not know.
        """
        if window_left(self.window, self.causal) is None:
            raise MetadataError(
                f"{self._label} cannot limit a window on the right, found window={self.window}: its kernels limit the "
                f"left side only; {_ELSEWHERE}"
            )
        stated = read_record(record, lengths)
        if stated.segments is not None:
            return self._ragged(lengths, segments=stated.segments)
        if stated.packed is not None:
            boundaries = (stated.packed.cu_seqlens_q, stated.packed.cu_seqlens_k)
            if not self._masks:
                raise MetadataError(
                    f"{self._label} cannot take cu_seqlens that only the device knows: a plan needs them on the host, "
                    f"and reading them back would wait for the device. Give cu_seqlens as tuples of ints, pin variant: "
                    f"fa2, or {_ELSEWHERE}"
                )
            mask = document_mask(*boundaries, lengths, causal=self.causal, window=self.window)
            return _masked(mask[None, None], behind_last(boundaries[1], lengths[1]))
        if stated.mask is None:
            return self._ragged(lengths)
        if record.kv_lengths is not None and not self._positional:
            if len(record.kv_lengths) == 1:  # one item: a slice does it
                return self._ragged(lengths, segments=(Segment(0, lengths[0], 0, record.kv_lengths[0]),))
            return self._ragged(lengths, kv_lengths=record.kv_lengths)
        return self._from_mask(stated.mask, lengths)

    @property
    def _label(self) -> str:
        return f"FLASHINFER_ATTN ({self.variant})"

    @property
    def _masks(self) -> bool:
        return self.variant in (None, "fa2")

    @property
    def _positional(self) -> bool:
        return self.causal or self.window is not None

    def _from_mask(self, mask: torch.Tensor, lengths: tuple[int, int]) -> FlashInferMetadata:
        found = f"attn_mask {tuple(mask.shape)} {mask.dtype}"
        if not self._masks:
            together = " together with causal or a window" if self._positional else ""
            prefix = "" if self._positional else "state kv_lengths where it keeps a prefix of each item, "
            raise MetadataError(
                f"{self._label} cannot take {found}{together}: its kernel has no mask; {prefix}pin variant: fa2, or "
                f"{_ELSEWHERE}"
            )
        if mask.dtype != torch.bool:
            raise MetadataError(
                f"{self._label} cannot add {found} to the scores: needs a bool mask; {_ELSEWHERE}"
            )
        if mask.dim() == 2:
            mask = mask[:, None, None].expand(-1, 1, lengths[0], -1)
        if mask.shape[1] > 1:
            raise MetadataError(
                f"{self._label} cannot take {found}: its kernel has one mask for all heads, this one has "
                f"{mask.shape[1]}; {_ELSEWHERE}"
            )
        if self._positional:
            mask = mask & position_mask(*lengths, causal=self.causal, window=self.window, device=mask.device)
        return _masked(mask)

    def _ragged(
        self,
        lengths: tuple[int, int],
        segments: tuple[Segment, ...] | None = None,
        kv_lengths: tuple[int, ...] | None = None,
    ) -> FlashInferMetadata:
        counts = [lengths]
        if segments is not None:
            counts = [(s.query_end - s.query_start, s.key_end - s.key_start) for s in segments]
        elif kv_lengths is not None:
            counts = [(lengths[0], keys) for keys in kv_lengths]
        if not any(queries and keys for queries, keys in counts):
            return FlashInferMetadata(segments=())
        if self.variant == "cute-dsl":
            self._check_cute_dsl(counts)
        return FlashInferMetadata(segments=segments, kv_lengths=kv_lengths)

    def _check_cute_dsl(self, counts: list[tuple[int, int]]) -> None:
        uneven = next(((q, k) for q, k in counts if q != k), None)
        if self.causal and uneven is not None:
            raise MetadataError(
                f"{self._label} has causal attention for equal query and key lengths, found {uneven[0]} and "
                f"{uneven[1]}; pin variant: fa2, or {_ELSEWHERE}"
            )
        if any(queries == 0 or keys == 0 for queries, keys in counts):
            raise MetadataError(
                f"{self._label} needs at least one query and one key token in each sequence, found {counts}: leave "
                f"empty sequences out, pin variant: fa2, or {_ELSEWHERE}"
            )


def _masked(mask: torch.Tensor, unused_keys: torch.Tensor | None = None) -> FlashInferMetadata:
    empty_rows = rows_without_key(mask).transpose(1, 2)
    return FlashInferMetadata(packed_mask=pack_mask(mask), empty_rows=empty_rows, unused_keys=unused_keys)


def window_left(window: tuple[int, int] | None, causal: bool) -> int | None:
    """The kernels' left limit, -1 for none; None where a window has a limit on the right that causal does not give."""
    left, right = window or (-1, -1)
    return None if right >= 0 and not causal else left
