"""What the backends on torch's own attention calls share: masks as tensors, in [B, H, S, D] order."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from omni_attn.backends.abstract import AttentionImpl, AttentionMetadataBuilder, foreign_metadata
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import DENSE_FIELDS, read_record
from omni_attn.ops.masks import (
    behind_last,
    combine_masks,
    document_mask,
    keep_finite,
    position_mask,
    rows_without_key,
)
from omni_attn.ops.segments import Segment, attend_segments, attend_segments_with_lse


@dataclass(frozen=True, eq=False)
class MaskedMetadata:
    """M of a backend that takes masks as they are.

    Attributes:
        mask: broadcastable to [B, H, Sq, Sk], bool = keep or float = added; None = none.
        empty_rows: True for query rows without a key, broadcastable to [B, H, Sq, 1]; set whenever mask is.
        unused_keys: True for packed key tokens behind the last boundary, [1, T, 1, 1]; they may hold anything, NaN too.
        segments: parts of the sequence that attend to themselves only; None = the whole.
        is_plain: none of the above is set.
    """

    mask: torch.Tensor | None = None
    empty_rows: torch.Tensor | None = None
    unused_keys: torch.Tensor | None = None
    segments: tuple[Segment, ...] | None = None
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_plain", self.mask is None and self.segments is None)


class MaskedMetadataBuilder(AttentionMetadataBuilder):
    """Brings a record's masks and packing into one mask, or into segments where the host knows them."""

    reads: frozenset[str] = DENSE_FIELDS

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> MaskedMetadata:
        """See AttentionMetadataBuilder.build; masks stay on their device."""
        stated = read_record(record, lengths)
        if stated.segments is not None:
            return MaskedMetadata(segments=stated.segments)
        if stated.packed is not None:
            boundaries = (stated.packed.cu_seqlens_q, stated.packed.cu_seqlens_k)
            mask = document_mask(*boundaries, lengths, causal=self.causal, window=self.window)[None, None]
            return MaskedMetadata(mask, rows_without_key(mask), behind_last(boundaries[1], lengths[1]))
        if stated.mask is None:
            return MaskedMetadata()
        mask = stated.mask[:, None, None] if stated.mask.dim() == 2 else stated.mask
        if mask.dtype != torch.bool:
            mask = keep_finite(mask)
        if self.causal or self.window is not None:
            keep = position_mask(*lengths, causal=self.causal, window=self.window, device=mask.device)
            mask = combine_masks(mask, keep)
        return MaskedMetadata(mask=mask, empty_rows=rows_without_key(mask))


class MaskedImpl(AttentionImpl):
    """Attention through a call that takes [B, H, S, D] tensors, one mask, and causal for equal lengths."""

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self._positional = self.causal or self.window is not None

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """Output [B, H, Sq, Dv] of query [B, H, Sq, D], key, value [B, G, Sk, D]; mask bool, or float in any dtype."""

    @abstractmethod
    def attend_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with the log-sum-exp [B, H, Sq] float32 beside it."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: MaskedMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward."""
        if not isinstance(metadata, MaskedMetadata):
            raise foreign_metadata(self, metadata, MaskedMetadata)
        if metadata.is_plain and not self._positional:  # the hot path of diffusion models, kept short
            output = self.attend(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, False
            )
            return output.transpose(1, 2).contiguous()
        if metadata.segments is not None:
            return attend_segments(self._whole, query, key, value, metadata.segments)
        key, value = _used(metadata, key), _used(metadata, value)
        return self._whole(query, key, value, metadata.mask, metadata.empty_rows)

    def forward_with_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: MaskedMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionImpl.forward_with_lse."""
        if not isinstance(metadata, MaskedMetadata):
            raise foreign_metadata(self, metadata, MaskedMetadata)
        if metadata.segments is not None:
            return attend_segments_with_lse(self._whole_with_lse, query, key, value, metadata.segments)
        key, value = _used(metadata, key), _used(metadata, value)
        return self._whole_with_lse(query, key, value, metadata.mask, metadata.empty_rows)

    def _whole_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        empty_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mask, empty_rows, is_causal = self._positions(query, key, mask, empty_rows)
        output, lse = self.attend_with_lse(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, is_causal
        )
        if empty_rows is not None:
            output = output.masked_fill(empty_rows, 0.0)
            lse = lse.masked_fill(empty_rows[..., 0], float("-inf"))
        return output.transpose(1, 2).contiguous(), lse

    def _whole(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        empty_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mask, empty_rows, is_causal = self._positions(query, key, mask, empty_rows)
        output = self.attend(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, is_causal
        )
        if empty_rows is not None:
            output = output.masked_fill(empty_rows, 0.0)
        return output.transpose(1, 2).contiguous()

    def _positions(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor | None,
        empty_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
        """Causal and window as torch's flag where the alignments agree, else as a mask on this device."""
        if mask is not None or not self._positional:
            return mask, empty_rows, False
        num_queries, num_keys = query.shape[1], key.shape[1]
        if self.window is None and num_queries == num_keys:
            return None, None, True
        keep = position_mask(
            num_queries, num_keys, causal=self.causal, window=self.window, device=query.device
        )
        keep = keep[None, None]
        return keep, rows_without_key(keep), False


def _used(metadata: MaskedMetadata, tensor: torch.Tensor) -> torch.Tensor:
    """Keys or values with zeros behind the last boundary: weight 0 times a NaN there would be NaN."""
    return tensor if metadata.unused_keys is None else tensor.masked_fill(metadata.unused_keys, 0.0)
