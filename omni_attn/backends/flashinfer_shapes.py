"""What a planned call of FlashInfer looks like: its sequences, how its rows lie, and the sizes its kernels can count.

Legend: B batch, S sequence, T packed tokens, H heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_attn.backends.flashinfer_kernels import FlashInferKernel
from omni_attn.errors import MetadataError
from omni_attn.ops.layout import unit_stride
from omni_attn.ops.segments import Segment

UINT32_MAX = 2**32 - 1

Cleared = tuple[tuple[slice, slice], ...]


@dataclass(frozen=True)
class RaggedShape:
    """What a plan depends on, but for dtype and device. Equal shapes share plans.

    Attributes:
        num_heads ... window_left: the layer's geometry; window_left -1 = no window.
        batch, lengths: batch size, (query tokens, key tokens) of a call.
        segments: sequences packed behind one another in a batch of one; None = each item is a sequence.
        kv_lengths: valid keys of each item, None = all.
        fp8_values: values are quantised in each call.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    softmax_scale: float
    causal: bool
    window_left: int
    batch: int
    lengths: tuple[int, int]
    segments: tuple[Segment, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    fp8_values: bool = False

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(query tokens, key tokens) of each sequence."""
        if self.segments is not None:
            return [(s.query_end - s.query_start, s.key_end - s.key_start) for s in self.segments]
        keys = self.kv_lengths or (self.lengths[1],) * self.batch
        return [(self.lengths[0], count) for count in keys]

    @property
    def used(self) -> tuple[int, int] | None:
        """Tokens of query and key before the last boundary, None = all."""
        return None if self.segments is None else (self.segments[-1].query_end, self.segments[-1].key_end)

    @property
    def rows_without_key(self) -> Cleared:
        """(items, rows) of the output that see no key; what a kernel writes there is not relied on."""
        everyone = slice(None)
        if self.kv_lengths is not None:
            return tuple((slice(i, i + 1), everyone) for i, count in enumerate(self.kv_lengths) if count == 0)
        if self.segments is None:
            blind = self._blind(*self.lengths)
            return ((everyone, slice(0, blind)),) if blind else ()
        found = []
        for segment, counts in zip(self.segments, self.sequences, strict=True):
            if blind := self._blind(*counts):
                found.append((everyone, slice(segment.query_start, segment.query_start + blind)))
        if self.segments[-1].query_end < self.lengths[0]:
            found.append((everyone, slice(self.segments[-1].query_end, None)))
        return tuple(found)

    def _blind(self, queries: int, keys: int) -> int:
        """How many first rows of a sequence see no key."""
        if keys == 0:
            return queries
        return max(queries - keys, 0) if self.causal else 0


def strided_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[T, H, D] whose last dimension lies dense in memory; a view where the batch can be merged with the tokens."""
    return unit_stride(tensor).flatten(0, 1)


def contiguous_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[T, H, D] contiguous."""
    return tensor.contiguous().flatten(0, 1)


def check_views(kernel: FlashInferKernel, *tensors_BSHD: torch.Tensor) -> None:
    """check_offsets for a call: of contiguous tensors a plan's shape tells, of views each call.

    Raises:
        MetadataError: see check_offsets.
    """
    if kernel.variant == "fa2":
        check_offsets(*(strided_rows(tensor) for tensor in tensors_BSHD))


def check_offsets(*rows_THD: torch.Tensor) -> None:
    """Holds tensors against the 32-bit element offsets of variant fa2.

    Raises:
        MetadataError: an element lies further from the start than 32 bits can say.
    """
    for rows in rows_THD:
        reach = sum((size - 1) * stride for size, stride in zip(rows.shape, rows.stride(), strict=True))
        if reach > UINT32_MAX:
            raise MetadataError(
                f"FLASHINFER_ATTN (fa2) counts elements in 32 bits: a tensor of {tuple(rows.shape)} reaches {reach}, "
                f"past {UINT32_MAX}. Split the batch or the heads, or choose TORCH_SDPA or CUDNN_ATTN for this role"
            )
