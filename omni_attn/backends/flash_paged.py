"""FLASH_ATTN over a paged KV cache: the kernels read the pages through the block table, nothing is brought together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.compiler import is_compiling as _is_compiling

from omni_attn.backends.flash_paged_kernels import (
    PagedFlashKernel,
    flash_attn_paged,
    import_paged_flash_kernel,
    keep_paged_kernel,
)
from omni_attn.backends.paged import (
    CommonAttentionMetadata,
    PagedMetadataBuilder,
    one_causality,
)
from omni_attn.backends.paged_impl import PagedKernelImpl
from omni_attn.ops.paged.write import write_kv_cache


@dataclass(frozen=True, eq=False, kw_only=True)
class FlashPagedMetadata:
    """M of FLASH_ATTN over pages: what was stated, as its kernels want it.

    Attributes:
        block_table: int32 [R, W], no wider than the longest request: its width tells the kernel how far keys may go.
        num_tokens: query tokens that the kernel is given; those of no request only where a CUDA graph fixed their
            number.
        rest: see CommonAttentionMetadata.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor | None
    causal: bool
    num_tokens: int
    max_query_len: int


class FlashPagedBuilder(PagedMetadataBuilder):
    """Hands on what lies on the device already. A captured graph reads the lengths of each replay there."""

    supports_update_block_table: ClassVar[bool] = True

    def build(self, common: CommonAttentionMetadata) -> FlashPagedMetadata:
        """See PagedMetadataBuilder.build.

        Raises:
            MetadataError: causal and non-causal requests in one batch.
        """
        causal = one_causality(f"FLASH_ATTN ({self.variant})", common.causal)
        width = max(1, -(-common.max_seq_len // self.kv_cache_spec.block_size))
        real = common.num_actual_tokens if self._for_cudagraph else int(common.query_start_loc_cpu[-1])
        return FlashPagedMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table[:, :width],
            slot_mapping=common.slot_mapping,
            causal=causal,
            num_tokens=real,
            max_query_len=max(1, common.max_query_len),
        )

    def update_block_table(
        self, metadata: Any, block_table: torch.Tensor, slot_mapping: torch.Tensor | None
    ) -> FlashPagedMetadata:
        """See PagedMetadataBuilder.update_block_table."""
        width = metadata.block_table.shape[1]
        table = block_table[:, :width]
        updated: FlashPagedMetadata = replace(metadata, block_table=table, slot_mapping=slot_mapping)
        return updated


class FlashPagedImpl(PagedKernelImpl):
    """One layer on a FlashAttention kernel over pages."""

    backend: ClassVar[str] = "FLASH_ATTN"
    metadata_cls: ClassVar[type] = FlashPagedMetadata

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.kernel: PagedFlashKernel = import_paged_flash_kernel(self.variant, self.head_size)
        self._window = self.window or (-1, -1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Where a copy is loaded, the operator has to find its kernel too."""
        self.__dict__.update(state)
        keep_paged_kernel(self.kernel)

    def update_kv_cache(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See PagedAttentionImpl.update_kv_cache."""
        write_kv_cache(key, value, kv_cache, slot_mapping)

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: FlashPagedMetadata, output: torch.Tensor
    ) -> None:
        """See PagedKernelImpl.attend; rows of tokens of no request hold anything."""
        count = metadata.num_tokens
        if not count:
            return
        arguments = (
            query[:count],
            kv_cache,
            output[:count],
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.max_query_len,
            self.softmax_scale,
            metadata.causal,
        )
        if _is_compiling():
            flash_attn_paged(*arguments, *self._window, self.kernel.module)
        else:
            self.kernel.attend(*arguments, self._window)
