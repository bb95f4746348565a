"""BLOCK_SUMMARY_ATTN: the best key blocks exactly, all others as one key each; training-free.

After h3-sparse-attn. Variants are executors that know such summaries; both compute the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from omni_attn.backends import sparse_executors
from omni_attn.backends.abstract import AttentionBackend, foreign_metadata
from omni_attn.backends.block_sparse_builder import options_of
from omni_attn.backends.block_sparse_impl import BlockSparseImpl
from omni_attn.backends.block_summary_builder import BlockSummaryMetadata, BlockSummaryMetadataBuilder
from omni_attn.backends.block_summary_facts import SUMMARY_FACTS, SUMMARY_VARIANTS
from omni_attn.config import AttentionSpec
from omni_attn.facts import AttentionRequest, BackendFacts, DeviceInfo
from omni_attn.ops.block_sparse.executor import SummarisingExecutor
from omni_attn.ops.block_sparse.selection import BlockSelection
from omni_attn.ops.block_sparse.selectors import blocks_kept
from omni_attn.ops.block_summary import block_summary_attention, raster_blocks, select_by_means
from omni_attn.ops.operators import is_traced


class BlockSummaryImpl(BlockSparseImpl):
    """One layer on an executor that knows summaries."""

    backend: ClassVar[str] = "BLOCK_SUMMARY_ATTN"

    kernels: ClassVar[frozenset[str]] = frozenset({"executor"})

    def load_kernels(self) -> None:
        """See BlockSparseImpl."""
        self.executor = load_executor(self.variant or "torch")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: BlockSummaryMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward; tokens behind those in use come out as zeros."""
        if not isinstance(metadata, BlockSummaryMetadata):
            raise foreign_metadata(self, metadata, BlockSummaryMetadata)
        if metadata.dense is not None:
            return self.dense.forward(query, key, value, metadata.dense)
        if not metadata.padded:
            return self._attend(query, key, value, metadata)
        used = metadata.tokens
        output = self._attend(query[:, :used], key[:, :used], value[:, :used], metadata)
        return F.pad(output, (0, 0, 0, 0, 0, query.shape[1] - used))

    def select_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: BlockSummaryMetadata,
        **layer_inputs: torch.Tensor,
    ) -> BlockSelection | None:
        """See AttentionImpl.select_blocks; the blocks attended to exactly. None on the route "SDPA"."""
        if not isinstance(metadata, BlockSummaryMetadata):
            raise foreign_metadata(self, metadata, BlockSummaryMetadata)
        if metadata.dense is not None:
            return None
        query, key, value = (x[:, : metadata.tokens] for x in (query, key, value))
        blocks = raster_blocks(query.shape[1], metadata.block_size, query.device)
        means = self.executor.pack(query, key, value, blocks, blocks).means
        selected = select_by_means(means, metadata.topk, self.softmax_scale)
        return BlockSelection(selected, blocks, blocks, summaries=True)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: BlockSummaryMetadata
    ) -> torch.Tensor:
        size, sparsity, scale = metadata.block_size, metadata.sparsity, self.softmax_scale
        if is_traced(query):
            return torch.ops.omni_attn.block_summary_attention(  # type: ignore[no-any-return]
                query, key, value, size, sparsity, scale, self.executor.name
            )
        return block_summary_attention(self.executor, query, key, value, size, metadata.topk, scale)


def load_executor(name: str) -> SummarisingExecutor:
    """The executor of a variant.

    Raises:
        BackendImportError: Triton is missing or broken.
    """
    executor = sparse_executors.make_executor(name, f"BLOCK_SUMMARY_ATTN ({name})")
    assert isinstance(executor, SummarisingExecutor)
    return executor


@torch.library.custom_op("omni_attn::block_summary_attention", mutates_args=())
def _block_summary_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_size: int,
    sparsity: float,
    softmax_scale: float,
    executor: str,
) -> torch.Tensor:
    topk = blocks_kept(sparsity, -(-key.shape[1] // block_size))
    return block_summary_attention(
        load_executor(executor), query, key, value, block_size, topk, softmax_scale
    )


@_block_summary_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


class BlockSummaryBackend(AttentionBackend):
    """Selected blocks exactly, the others by their means."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        replace(SUMMARY_FACTS, dtypes=SUMMARY_VARIANTS[-1].facts.dtypes),
        summary="the best key blocks of 128 tokens exactly, all others as one key each; training-free",
        variants=SUMMARY_VARIANTS,
        option_fields=frozenset({"block_sparse"}),
        numerics="approximate",
        selects_blocks=True,
    )

    @staticmethod
    def get_name() -> str:
        """BLOCK_SUMMARY_ATTN."""
        return "BLOCK_SUMMARY_ATTN"

    @staticmethod
    def get_impl_cls() -> type[BlockSummaryImpl]:
        """BlockSummaryImpl."""
        return BlockSummaryImpl

    @staticmethod
    def get_builder_cls() -> type[BlockSummaryMetadataBuilder]:
        """BlockSummaryMetadataBuilder."""
        return BlockSummaryMetadataBuilder

    @classmethod
    def validate_configuration(
        cls, request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None
    ) -> list[str]:
        """See AttentionBackend.validate_configuration."""
        reasons = super().validate_configuration(request, device, spec)
        precision = options_of(spec).precision
        if precision != "bf16":
            reasons.append(
                f"needs block_sparse.precision bf16, found {precision}: the kernels multiply in the inputs' dtype"
            )
        return reasons
