"""What a step of FASTVIDEO_VSA needs: the grid held against the sequence, the number of tiles, and the route."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from omni_attn.backends.abstract import AttentionMetadataBuilder
from omni_attn.backends.fastvideo_vsa_facts import VSA_FACTS, options_of
from omni_attn.backends.masked import MaskedMetadata
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import DENSE_FIELDS, read_record
from omni_attn.errors import MetadataError
from omni_attn.facts.lengths import length_reasons
from omni_attn.ops.block_sparse.selectors import blocks_kept
from omni_attn.ops.segments import Segment
from omni_attn.ops.video_tiles import Extent, tile_count

VSARoute = Literal["VSA", "VSA_ALL_BLOCKS", "SDPA"]
_INSTEAD = "Choose TORCH_SDPA for this role, or add it as fallback"


@dataclass(frozen=True, eq=False)
class FastVideoVSAMetadata:
    """M of FASTVIDEO_VSA.

    Attributes:
        route: "VSA"; "VSA_ALL_BLOCKS", the same over all tiles, of a checkpoint whose coarse term is part of what it
            computes; "SDPA", dense attention without the coarse term.
        route_reason: why this route, with the tiles kept and the tiles there are.
        grid: (T, H, W) of the tokens in use; tile_size: extent of a tile.
        tiles: how many tiles the grid has; topk: how many a query tile attends to.
        used: tokens in use where structural padding lies behind them, None = all.
        dense: what the dense impl runs with; None = the sparse executor runs.
    """

    route: VSARoute
    route_reason: str
    grid: Extent
    tile_size: Extent
    tiles: int
    topk: int
    used: int | None = None
    dense: MaskedMetadata | None = None

    @property
    def runs_kernel(self) -> bool:
        """False where the route leaves the kernel that was selected."""
        return self.dense is None


class FastVideoVSAMetadataBuilder(AttentionMetadataBuilder):
    """Counts tiles and picks the route, on the host alone."""

    reads: ClassVar[frozenset[str]] = DENSE_FIELDS | {"vsa_dit_seq_shape", "preserve_vsa_all_blocks"}  # type: ignore[misc]

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> FastVideoVSAMetadata:
        """See AttentionMetadataBuilder.build.

        Raises:
            MetadataError: also for a mask that hides a key, cu_seqlens, unequal lengths, and a grid that is missing or
                does not hold the tokens of the call.
        """
        if (used := _used_tokens(record, lengths)) == 0:
            return FastVideoVSAMetadata(
                "SDPA", "no tokens", (0, 0, 0), (1, 1, 1), 0, 0, dense=MaskedMetadata(segments=())
            )
        grid, options = _checked_grid(record, used), options_of(self.spec)
        tiles = tile_count(grid, options.tile_size)
        wanted = options.topk if options.sparsity is None else blocks_kept(options.sparsity, tiles)
        assert wanted is not None
        padding = used if used != lengths[0] else None
        common = (grid, options.tile_size, tiles)
        if wanted < tiles:
            return FastVideoVSAMetadata("VSA", f"{wanted} of {tiles} tiles", *common, wanted, padding)
        budget = f"topk {wanted}" if options.sparsity is None else f"sparsity {options.sparsity:g}"
        every = f"{budget} covers all {tiles} tiles of {_by(options.tile_size)} in grid {_by(grid)}"
        if record.preserve_vsa_all_blocks:
            why = f"{every}; the record keeps the sparse path (preserve_vsa_all_blocks)"
            return FastVideoVSAMetadata("VSA_ALL_BLOCKS", why, *common, tiles, padding)
        parts = None if padding is None else (Segment(0, used, 0, used),)
        why = f"{every}: dense attention, without the coarse term"
        return FastVideoVSAMetadata("SDPA", why, *common, tiles, padding, MaskedMetadata(segments=parts))


def _used_tokens(record: AttentionMetadata, lengths: tuple[int, int]) -> int:
    """How many tokens of the call are in use, the same number of queries and keys; 0 where there is nothing to do."""
    stated = read_record(record, lengths)
    if stated.mask is not None:
        raise MetadataError(
            f"FASTVIDEO_VSA cannot take attn_mask {tuple(stated.mask.shape)} {stated.mask.dtype}: tiles are "
            f"selected by their means, which know no masks. {_INSTEAD}"
        )
    if record.cu_seqlens_q is not None:
        raise MetadataError(
            "FASTVIDEO_VSA cannot take cu_seqlens_q: the grid is that of one video, and packed sequences are "
            f"several. {_INSTEAD}"
        )
    queries, keys = lengths
    if record.packed_padding is not None:
        queries, keys = record.packed_padding.q_length, record.packed_padding.kv_length
    if 0 in (*lengths, queries, keys):
        return 0
    if reasons := tuple(length_reasons(VSA_FACTS, queries, keys)):
        raise MetadataError(f"FASTVIDEO_VSA {'; '.join(reasons)}: it is self-attention. {_INSTEAD}")
    return queries


def _checked_grid(record: AttentionMetadata, tokens: int) -> Extent:
    grid = record.vsa_dit_seq_shape
    if grid is None:
        raise MetadataError(
            f"FASTVIDEO_VSA needs vsa_dit_seq_shape = (T, H, W) in the record, found none for {tokens} "
            f"tokens: state the grid of the video's tokens. {_INSTEAD}"
        )
    if len(grid) != 3 or min(grid) < 1 or math.prod(grid) != tokens:
        raise MetadataError(
            f"FASTVIDEO_VSA needs vsa_dit_seq_shape = (T, H, W) with T * H * W = {tokens} tokens, found "
            f"{_by(grid)} = {math.prod(grid)}: state the grid after patchify. {_INSTEAD}"
        )
    return grid


def _by(extent: tuple[int, ...]) -> str:
    return " x ".join(map(str, extent))
