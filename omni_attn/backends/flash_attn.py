"""FLASH_ATTN: FlashAttention 2, 3 and 4.

Variants, packages and modules:
    fa3   flash-attn-3, tokenspeed-fa3   flash_attn_interface
          fa3-fwd                        fa3_fwd_interface     (forward only, bfloat16, no windows)
    fa4   flash-attn-4                   flash_attn.cute       (compiles at the first call of each kind)
    fa2   flash-attn                     flash_attn
Key-padding masks run by packing: the kept keys are gathered behind one another and the kernel gets their boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.compiler import is_compiling as _is_compiling

from omni_attn.backends.abstract import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    foreign_metadata,
)
from omni_attn.backends.flash_kernels import FlashKernel, first, import_flash_kernel, keep_kernel
from omni_attn.backends.flash_packages import FLASH_FACTS, FLASH_VARIANTS
from omni_attn.backends.flash_paged import FlashPagedBuilder, FlashPagedImpl
from omni_attn.backends.flash_paged_packages import FLASH_PAGED_FACTS
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import DENSE_FIELDS, Packed, check_token_count, read_record
from omni_attn.errors import MetadataError
from omni_attn.facts import BackendFacts
from omni_attn.ops.layout import unit_stride
from omni_attn.ops.masks import behind_last
from omni_attn.ops.segments import Segment, attend_segments, attend_segments_with_lse


@dataclass(frozen=True, eq=False)
class FlashMetadata:
    """M of FLASH_ATTN.

    Attributes:
        segments: parts of the sequence known on the host.
        packed: boundaries on the device.
        key_index: int64 [B * K]; kept keys of all items first, in order. The packed boundaries end before the rest.
        unused_rows, unused_keys: True for packed query / key tokens behind the last boundary, [1, T, 1, 1].
        is_plain: none of the above is set: one dense call.
    """

    segments: tuple[Segment, ...] | None = None
    packed: Packed | None = None
    key_index: torch.Tensor | None = None
    unused_rows: torch.Tensor | None = None
    unused_keys: torch.Tensor | None = None
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_plain", self.packed is None and self.segments is None)

    @property
    def without_lse(self) -> str | None:
        """Why there is no log-sum-exp of these calls; None where there is."""
        if self.packed is None:
            return None
        return "FLASH_ATTN gives none where a mask, or boundaries that only the device knows, pack the tokens"


class FlashMetadataBuilder(AttentionMetadataBuilder):
    """Makes boundaries and gather indices on the device, without waiting for it."""

    reads: frozenset[str] = DENSE_FIELDS

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> FlashMetadata:
        """See AttentionMetadataBuilder.build.

        Raises:
            MetadataError: also for masks other than key padding, and for a mask with causal or a window.
        """
        stated = read_record(record, lengths)
        if stated.segments is not None:
            return FlashMetadata(segments=stated.segments)
        if stated.packed is not None:
            packed = stated.packed
            return FlashMetadata(
                packed=packed,
                unused_rows=behind_last(packed.cu_seqlens_q, lengths[0]),
                unused_keys=behind_last(packed.cu_seqlens_k, lengths[1]),
            )
        if stated.mask is None:
            return FlashMetadata()
        if stated.mask_kind != "padding":
            raise MetadataError(
                f"FLASH_ATTN cannot take attn_mask {tuple(stated.mask.shape)} {stated.mask.dtype}: needs a bool key-"
                "padding mask [B, K]. Choose TORCH_SDPA, CUDNN_ATTN or FLEX_ATTN for this role, or add one as fallback"
            )
        if self.causal or self.window is not None:
            raise MetadataError(
                "FLASH_ATTN cannot take attn_mask together with causal or a window: packing the kept keys moves their "
                "positions. Choose TORCH_SDPA, CUDNN_ATTN or FLEX_ATTN for this role, or add one as fallback"
            )
        if record.kv_lengths is not None and len(record.kv_lengths) == 1:  # one item: a slice does it
            return FlashMetadata(segments=(Segment(0, lengths[0], 0, record.kv_lengths[0]),))
        return _pack_keys(stated.mask, lengths)


def _pack_keys(mask: torch.Tensor, lengths: tuple[int, int]) -> FlashMetadata:
    items, device = mask.shape[0], mask.device
    check_token_count("FLASH_ATTN", items * max(lengths))
    boundaries_q = torch.arange(items + 1, device=device, dtype=torch.int32) * lengths[0]
    boundaries_k = torch.zeros(items + 1, device=device, dtype=torch.int32)
    boundaries_k[1:] = mask.sum(-1).cumsum(0)
    kept_first = torch.argsort((~mask).flatten().to(torch.uint8), stable=True)
    return FlashMetadata(packed=Packed(boundaries_q, boundaries_k, *lengths), key_index=kept_first)


class FlashAttentionImpl(AttentionImpl):
    """One layer on a FlashAttention kernel."""

    backend: ClassVar[str] = "FLASH_ATTN"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.kernel: FlashKernel = self.load_kernel()
        self._window = self.window or (-1, -1)
        own_scale = None if self.softmax_scale == self.head_size**-0.5 else self.softmax_scale
        self._kernel_of_layer = self.kernel.dense(own_scale, self.causal, self._window)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Where a copy is loaded, the operators have to find its kernel too."""
        self.__dict__.update(state)
        keep_kernel(self.kernel)

    def load_kernel(self) -> FlashKernel:
        """The kernel of this layer's variant; other device families have others.

        Raises:
            BackendImportError: see import_flash_kernel.
        """
        return import_flash_kernel(self.variant, self.head_size)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: FlashMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward."""
        if not isinstance(metadata, FlashMetadata):
            raise foreign_metadata(self, metadata, FlashMetadata)
        if metadata.is_plain:  # the hot path of diffusion models, kept short
            return self._dense(query, key, value)
        if metadata.segments is not None:
            return attend_segments(self._dense, query, key, value, metadata.segments)
        return self._varlen(query, key, value, metadata)

    def forward_with_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: FlashMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionImpl.forward_with_lse."""
        if not isinstance(metadata, FlashMetadata):
            raise foreign_metadata(self, metadata, FlashMetadata)
        if metadata.without_lse is not None:
            raise MetadataError(
                f"log-sum-exp asked for, and {metadata.without_lse}: pass sequences one by one"
            )
        if metadata.segments is not None:
            output, lse = attend_segments_with_lse(self._dense_with_lse, query, key, value, metadata.segments)
        else:
            output, lse = self._dense_with_lse(query, key, value)
        return output, lse.masked_fill(lse == float("inf"), float("-inf"))

    def _dense(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if _is_compiling():
            return self._dense_with_lse(query, key, value)[0]
        return first(self._kernel_of_layer(unit_stride(query), unit_stride(key), unit_stride(value)))

    def _dense_with_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        run = self.kernel.dense_with_lse_op if _is_compiling() else self.kernel.dense_with_lse
        return run(query, key, value, self.softmax_scale, self.causal, self._window)

    def _varlen(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: FlashMetadata
    ) -> torch.Tensor:
        packed = metadata.packed
        assert packed is not None
        if metadata.unused_keys is not None:
            # Kernels multiply whole tiles of values: weight 0 times a NaN behind the last boundary would be NaN.
            value = value.masked_fill(metadata.unused_keys, 0.0)
        query_THD, key_TGD, value_TGD = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        if metadata.key_index is not None:
            key_TGD, value_TGD = key_TGD[metadata.key_index], value_TGD[metadata.key_index]
        run = self.kernel.varlen_op if _is_compiling() else self.kernel.varlen
        output_THD = run(
            query_THD,
            key_TGD,
            value_TGD,
            packed.cu_seqlens_q,
            packed.cu_seqlens_k,
            packed.max_seqlen_q,
            packed.max_seqlen_k,
            self.softmax_scale,
            self.causal,
            self._window,
        )
        output = output_THD.view(*query.shape[:3], value.shape[-1])
        return output if metadata.unused_rows is None else output.masked_fill(metadata.unused_rows, 0.0)


class FlashAttentionBackend(AttentionBackend):
    """FlashAttention 2, 3 and 4 from their own packages."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        FLASH_FACTS,
        summary="FlashAttention 2, 3 and 4 from their own packages",
        variants=FLASH_VARIANTS,
        error="2.3e-3",
        paged=FLASH_PAGED_FACTS,
    )

    @staticmethod
    def get_name() -> str:
        """FLASH_ATTN."""
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        """FlashAttentionImpl."""
        return FlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashMetadataBuilder]:
        """FlashMetadataBuilder."""
        return FlashMetadataBuilder

    @staticmethod
    def get_paged_impl_cls() -> type[FlashPagedImpl]:
        """FlashPagedImpl."""
        return FlashPagedImpl

    @staticmethod
    def get_paged_builder_cls() -> type[FlashPagedBuilder]:
        """FlashPagedBuilder."""
        return FlashPagedBuilder
