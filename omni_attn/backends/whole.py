"""What the backends on kernels for whole sequences share: no masks, and packing only where the host knows the lengths.

Packed sequences run one after the other. Every sequence is held against the kernel's limits on lengths before it runs.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from omni_attn.backends.abstract import (
    AttentionImpl,
    AttentionMetadataBuilder,
    foreign_metadata,
    metadata_of_another,
)
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import DENSE_FIELDS, read_record
from omni_attn.errors import MetadataError
from omni_attn.facts import KernelFacts
from omni_attn.facts.lengths import length_reasons
from omni_attn.ops.layout import INT32_MAX
from omni_attn.ops.segments import Segment, attend_segments

_INSTEAD = "Choose TORCH_SDPA or CUDNN_ATTN for this role, or add one as fallback"


@dataclass(frozen=True, eq=False)
class WholeMetadata:
    """M of a backend that attends whole sequences.

    Attributes:
        made_for: label of the kernel whose limits the lengths were held against.
        segments: parts of the sequence that attend to themselves only; None = the whole.
    """

    made_for: str
    segments: tuple[Segment, ...] | None = None


class WholeMetadataBuilder(AttentionMetadataBuilder):
    """Refuses masks and lengths that the kernel does not have, and hands out the parts of a packed sequence."""

    reads: frozenset[str] = DENSE_FIELDS

    @property
    @abstractmethod
    def label(self) -> str:
        """Backend and variant, to head an error text."""

    @property
    @abstractmethod
    def kernel_facts(self) -> KernelFacts:
        """Limits of the kernel that will run."""

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> WholeMetadata:
        """See AttentionMetadataBuilder.build.

        Raises:
            MetadataError: also for every mask that hides a key, for boundaries that only the device knows, and for
                sequences that are too short, or whose lengths the kernel cannot take.
        """
        stated = read_record(record, lengths)
        if stated.mask is not None:
            raise MetadataError(
                f"{self.label} cannot take attn_mask {tuple(stated.mask.shape)} {stated.mask.dtype}: its kernel has no "
                f"masks. {_INSTEAD}"
            )
        if stated.packed is not None:
            raise MetadataError(
                f"{self.label} cannot take cu_seqlens_q, cu_seqlens_k that only the device knows: reading them waits "
                f"for it. Give them as tuples of ints. {_INSTEAD}"
            )
        whole = Segment(0, lengths[0], 0, lengths[1])
        for part in (whole,) if stated.segments is None else stated.segments:
            self._check_lengths(part, "" if part == whole else f" (query tokens from {part.query_start} on)")
        return WholeMetadata(self.label, stated.segments)

    def _check_lengths(self, part: Segment, where: str) -> None:
        queries, keys = part.query_end - part.query_start, part.key_end - part.key_start
        if reasons := tuple(length_reasons(self.kernel_facts, queries, keys, causal=self.causal)):
            raise MetadataError(f"{self.label} {'; '.join(reasons)}{where}. {_INSTEAD}")
        if (most := max(queries, keys) * self.num_heads * self.head_size) > INT32_MAX:
            raise MetadataError(
                f"{self.label} counts the elements of a sequence in 32 bits, up to {INT32_MAX}, found {most} = "
                f"{max(queries, keys)} tokens x {self.num_heads} heads x {self.head_size}{where}. {_INSTEAD}"
            )


class WholeImpl(AttentionImpl):
    """Attention through a call that takes [B, S, H, D] tensors of whole sequences.

    Attributes:
        label: backend and variant, equal to that of its builder.
    """

    label: str

    @abstractmethod
    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Output [B, Sq, H, D], contiguous, of query [B, Sq, H, D], key and value [B, Sk, G, D]."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: WholeMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward."""
        if not isinstance(metadata, WholeMetadata):
            raise foreign_metadata(self, metadata, WholeMetadata)
        if metadata.made_for != self.label:
            raise metadata_of_another(self.label, metadata)
        if metadata.segments is not None:
            return attend_segments(self.attend, query, key, value, metadata.segments)
        return self.attend(query, key, value)
