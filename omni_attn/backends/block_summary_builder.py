"""What a step of BLOCK_SUMMARY_ATTN needs: the tokens in use, the number of blocks kept, and the route."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from omni_attn.backends.block_sparse_builder import BlockSparseBuilder
from omni_attn.backends.block_summary_facts import SUMMARY_FACTS
from omni_attn.backends.masked import MaskedMetadata
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.sparse_sequence import dense_over, laid_out_tokens, unmasked_tokens
from omni_attn.backends.stated import DENSE_FIELDS
from omni_attn.ops.block_sparse.selectors import blocks_kept


@dataclass(frozen=True, eq=False)
class BlockSummaryMetadata:
    """M of BLOCK_SUMMARY_ATTN.

    Numbers are told and counted when they are asked for: a trace that lets lengths vary builds one too.

    Attributes:
        route: "BLOCK_SUMMARY", or "SDPA" for dense attention.
        tokens: those in use; sparsity: share of the blocks that are seen by their means; block_size: tokens of a block.
        padded: whether padding lies behind the tokens in use.
        dense: what the dense impl runs with; None on the sparse route.
        scheduled: the option that makes this step or layer dense, None where the number of blocks does.
        unapplied: options that nothing could be made of, each with the reason.
    """

    route: Literal["BLOCK_SUMMARY", "SDPA"]
    tokens: int
    sparsity: float
    block_size: int
    padded: bool = False
    dense: MaskedMetadata | None = None
    scheduled: str | None = None
    unapplied: tuple[str, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks of the tokens in use."""
        return -(-self.tokens // self.block_size)

    @property
    def topk(self) -> int:
        """Key blocks that a query block attends to exactly."""
        return blocks_kept(self.sparsity, self.blocks)

    @property
    def route_reason(self) -> str:
        """Why this route."""
        if self.dense is None:
            chosen = f"{self.topk} of {self.blocks} blocks of {self.block_size}, the others by their means"
            return "; ".join((chosen, *self.unapplied))
        if self.tokens == 0:
            return "no tokens"
        every = (
            f"block_sparse.sparsity {self.sparsity:g} leaves out none of {self.blocks} blocks of {self.block_size} in "
            f"{self.tokens} tokens"
        )
        return f"dense attention: {self.scheduled or every}"

    @property
    def runs_kernel(self) -> bool:
        """False where the route leaves the kernel that was selected."""
        return self.dense is None


class BlockSummaryMetadataBuilder(BlockSparseBuilder):
    """Counts blocks and decides the route, on the host alone.

    Attributes:
        block_size: tokens of a block.
    """

    block_size: ClassVar[int] = 128
    sequence_fields: ClassVar[frozenset[str]] = DENSE_FIELDS | {"video_layout"}

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> BlockSummaryMetadata:
        """See AttentionMetadataBuilder.build.

        Raises:
            MetadataError: also for a mask that hides a key, cu_seqlens, unequal lengths, and a layout that does not
                fit the call.
        """
        tokens = unmasked_tokens(record, lengths, SUMMARY_FACTS, "BLOCK_SUMMARY_ATTN")
        if tokens:
            tokens = laid_out_tokens(record, tokens, "BLOCK_SUMMARY_ATTN")
        scheduled = self.scheduled_dense_reason(record)
        sparse = BlockSummaryMetadata(
            "BLOCK_SUMMARY",
            tokens,
            self.options.sparsity,
            self.block_size,
            tokens != lengths[0],
            unapplied=self.unapplied(record),
        )
        if tokens and scheduled is None and sparse.topk < sparse.blocks:
            return sparse
        return replace(
            sparse,
            route="SDPA",
            dense=dense_over(tokens if sparse.padded else None) if tokens else MaskedMetadata(segments=()),
            scheduled=scheduled,
            unapplied=(),
        )
