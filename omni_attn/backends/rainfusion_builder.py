"""What a step of RAINFUSION_ATTN needs: where its videos lie, and whether this step, layer and size is sparse.

A step is sparse where all rules of block_sparse hold, and dense otherwise: that is a part of the method, for which a
dense impl stands beside the sparse one. Each product says which of the two it is, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal

from omni_attn.backends.block_sparse_builder import BlockSparseBuilder
from omni_attn.backends.masked import MaskedMetadata
from omni_attn.backends.metadata import AttentionMetadata, VideoLayout
from omni_attn.backends.rainfusion_facts import RAINFUSION_FACTS
from omni_attn.backends.sparse_sequence import INSTEAD, dense_over, laid_out_tokens
from omni_attn.errors import MetadataError
from omni_attn.facts.lengths import length_reasons
from omni_attn.ops.block_sparse.rainfusion import RainFusionLayout, protected_blocks
from omni_attn.ops.block_sparse.selectors import blocks_kept


@dataclass(frozen=True, eq=False)
class RainFusionMetadata:
    """M of RAINFUSION_ATTN.

    Attributes:
        route: "RAINFUSION", or "SDPA" for dense attention.
        route_reason: why this route.
        layout: where the videos lie among the tokens in use; None on the dense route.
        block_size: tokens of a block.
        dense: what the dense impl runs with; None on the sparse route.
        unapplied: options that nothing could be made of, each with the reason.
    """

    route: Literal["RAINFUSION", "SDPA"]
    route_reason: str
    layout: RainFusionLayout | None = None
    block_size: int = 128
    dense: MaskedMetadata | None = None
    unapplied: tuple[str, ...] = ()

    @property
    def runs_kernel(self) -> bool:
        """False where the route leaves the kernel that was selected."""
        return self.dense is None


class RainFusionMetadataBuilder(BlockSparseBuilder):
    """Reads the layout and decides the route, on the host alone.

    Attributes:
        block_size: tokens of a block.
        min_video_blocks: with less video than that, selection costs more than it saves.
    """

    block_size: ClassVar[int] = 128
    min_video_blocks: ClassVar[int] = 32

    sequence_fields: ClassVar[frozenset[str]] = frozenset(
        {"video_layout", "vsa_dit_seq_shape", "packed_padding"}
    )

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> RainFusionMetadata:
        """See AttentionMetadataBuilder.build.

        Raises:
            MetadataError: also for unequal lengths, and for a layout or grid that does not fit the tokens of the call.
        """
        if 0 in lengths:
            return RainFusionMetadata("SDPA", "no tokens", dense=MaskedMetadata(segments=()))
        if reasons := tuple(length_reasons(RAINFUSION_FACTS, *lengths)):
            raise MetadataError(f"RAINFUSION_ATTN {'; '.join(reasons)}: it is self-attention. {INSTEAD}")
        layout = stated_layout(record, lengths[0])
        used = layout.used_len if layout is not None else _used_tokens(record, lengths[0])
        dense_reason = self._dense_reason(record, layout)
        if layout is None or dense_reason is not None:
            dense = dense_over(None if used == lengths[0] else used)
            return RainFusionMetadata("SDPA", f"dense attention: {dense_reason}", dense=dense)
        unapplied = self.unapplied(record)
        reason = "; ".join((self._sparse_reason(layout), *unapplied))
        return RainFusionMetadata("RAINFUSION", reason, layout, self.block_size, unapplied=unapplied)

    def _dense_reason(self, record: AttentionMetadata, layout: RainFusionLayout | None) -> str | None:
        """The first rule that asks for dense attention, None where none does. No step is named: it is told once."""
        if (scheduled := self.scheduled_dense_reason(record)) is not None:
            return scheduled
        if layout is None:
            return "the record states no video_layout and no vsa_dit_seq_shape, so no video is known"
        least = self.min_video_blocks * self.block_size
        if layout.video_rows < least:
            return (
                f"needs at least {least} video tokens ({self.min_video_blocks} blocks of {self.block_size}) for "
                f"selection to pay, found {layout.video_rows} of {layout.used_len} tokens"
            )
        if missing := layout.missing_rows(self.block_size):
            return (
                f"needs tokens outside of the videos to fill each video but the last up to blocks of "
                f"{self.block_size}, found {missing} too few for {_grids(layout)}"
            )
        return None

    def _sparse_reason(self, layout: RainFusionLayout) -> str:
        blocks = -(-layout.used_len // self.block_size)
        kept = blocks_kept(self.options.sparsity, blocks)
        protected = len(protected_blocks(layout, self.block_size))
        return f"{kept} of {blocks} blocks of {self.block_size}, and {protected} protected ones"


def stated_layout(record: AttentionMetadata, tokens: int) -> RainFusionLayout | None:
    """Where a record says that videos lie among `tokens` tokens: its video_layout, else its grid; None without both.

    Raises:
        MetadataError: the numbers do not fit the tokens, or those in use.
    """
    used = _used_tokens(record, tokens)
    if record.video_layout is not None:
        return _layout_of(record.video_layout, laid_out_tokens(record, used, "RAINFUSION_ATTN"))
    grid = record.vsa_dit_seq_shape
    if grid is None:
        return None
    if len(grid) != 3 or min(grid) < 1 or prod(grid) != used:
        raise MetadataError(
            f"RAINFUSION_ATTN needs vsa_dit_seq_shape = (T, H, W) with T * H * W = {used} tokens, found "
            f"{' x '.join(map(str, grid))} = {prod(grid)}: state the grid after patchify. {INSTEAD}"
        )
    return RainFusionLayout(used, ((0, grid),))


def _layout_of(stated: VideoLayout, used: int) -> RainFusionLayout:
    start, spans = sum(stated.prefix_segments), []
    for grid in stated.spans:
        spans.append((start, grid))
        start += prod(grid)
    return RainFusionLayout(used, tuple(spans))


def _used_tokens(record: AttentionMetadata, tokens: int) -> int:
    """How many tokens are in use by the record's structural padding.

    Raises:
        MetadataError: queries and keys end at different places, or behind the tokens of the call.
    """
    padding = record.packed_padding
    if padding is None:
        return tokens
    if padding.q_length != padding.kv_length or not 0 <= padding.q_length <= tokens:
        raise MetadataError(
            f"RAINFUSION_ATTN needs packed_padding with equal query and key lengths up to {tokens}, found "
            f"{padding.q_length} and {padding.kv_length}: it is self-attention. {INSTEAD}"
        )
    return padding.q_length


def _grids(layout: RainFusionLayout) -> str:
    return " and ".join(" x ".join(map(str, grid)) for _, grid in layout.spans)
