"""What a step of FASTVIDEO_VSA needs: the grid held against the sequence, the number of tiles, and the route."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from omni_attn.backends.abstract import AttentionMetadataBuilder
from omni_attn.backends.fastvideo_vsa_facts import VSA_FACTS, options_of
from omni_attn.backends.masked import MaskedMetadata
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.sparse_sequence import INSTEAD, dense_over, unmasked_tokens
from omni_attn.backends.stated import DENSE_FIELDS
from omni_attn.errors import MetadataError
from omni_attn.ops.block_sparse.selectors import blocks_kept
from omni_attn.ops.video_tiles import Extent, tile_count

VSARoute = Literal["VSA", "VSA_ALL_BLOCKS", "SDPA"]


@dataclass(frozen=True, eq=False)
class FastVideoVSAMetadata:
    """M of FASTVIDEO_VSA.

    Attributes:
        route: "VSA"; "VSA_ALL_BLOCKS", the same over all tiles, of a checkpoint whose coarse term is part of what it
            computes; "SDPA", dense attention without the coarse term.
        route_reason: why this route, with the tiles kept and the tiles there are.
        grid: (T, H, W) of the video's tokens; tile_size: extent of a tile.
        tiles: how many tiles the grid has; topk: how many a query tile attends to.
        used: tokens in use where structural padding lies behind them, None = all.
        dense: what the dense impl runs with; None = the sparse executor runs.
        segments: tokens of each segment before the video, for impls whose models have such.
        compete: see omni_attn.ops.video_sparse.
    """

    route: VSARoute
    route_reason: str
    grid: Extent
    tile_size: Extent
    tiles: int
    topk: int
    used: int | None = None
    dense: MaskedMetadata | None = None
    segments: tuple[int, ...] = ()
    compete: bool = False

    @property
    def runs_kernel(self) -> bool:
        """False where the route leaves the kernel that was selected."""
        return self.dense is None


class FastVideoVSAMetadataBuilder(AttentionMetadataBuilder):
    """Counts tiles and picks the route, on the host alone.

    A model whose sequence holds more than one video overrides `read_sequence`, and `attend_to_all` where it has routes
    of its own.
    """

    reads: ClassVar[frozenset[str]] = DENSE_FIELDS | {"vsa_dit_seq_shape", "preserve_vsa_all_blocks"}  # type: ignore[misc]
    compete: ClassVar[bool] = False

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> FastVideoVSAMetadata:
        """See AttentionMetadataBuilder.build.

        Raises:
            MetadataError: also for a mask that hides a key, cu_seqlens, unequal lengths, and a grid that is missing or
                does not hold the tokens of the call.
        """
        if (used := unmasked_tokens(record, lengths, VSA_FACTS, "FASTVIDEO_VSA")) == 0:
            return FastVideoVSAMetadata(
                "SDPA", "no tokens", (0, 0, 0), (1, 1, 1), 0, 0, dense=MaskedMetadata(segments=())
            )
        segments, grid, used = self.read_sequence(record, used)
        options = options_of(self.spec)
        tiles = tile_count(grid, options.tile_size)
        wanted = options.topk if options.sparsity is None else blocks_kept(options.sparsity, tiles)
        assert wanted is not None
        how = "competing with" if self.compete else "beside"
        budget = f"topk {wanted}" if options.sparsity is None else f"sparsity {options.sparsity:g}"
        made = FastVideoVSAMetadata(
            "VSA",
            f"{wanted} of {tiles} tiles"
            + (f", {how} {sum(segments)} tokens before them" if segments else ""),
            grid,
            options.tile_size,
            tiles,
            min(wanted, tiles),
            used if used != lengths[0] else None,
            segments=segments,
            compete=self.compete,
        )
        if wanted < tiles:
            return made
        every = f"{budget} covers all {tiles} tiles of {by(options.tile_size)} in grid {by(grid)}"
        return self.attend_to_all(record, made, every)

    def read_sequence(self, record: AttentionMetadata, used: int) -> tuple[tuple[int, ...], Extent, int]:
        """Segments before the video, the video's grid, and the tokens that both hold, at most `used`.

        Raises:
            MetadataError: the record states no grid, or one of other tokens.
        """
        return (), checked_grid(record, used), used

    def attend_to_all(
        self, record: AttentionMetadata, made: FastVideoVSAMetadata, every: str
    ) -> FastVideoVSAMetadata:
        """The route where all tiles are kept; `every` says why they are."""
        if record.preserve_vsa_all_blocks:
            why = f"{every}; the record keeps the sparse path (preserve_vsa_all_blocks)"
            return replace(made, route="VSA_ALL_BLOCKS", route_reason=why)
        why = f"{every}: dense attention, without the coarse term"
        return replace(made, route="SDPA", route_reason=why, dense=dense_over(made.used))


def checked_grid(record: AttentionMetadata, tokens: int) -> Extent:
    """The record's grid, which has to hold so many tokens.

    Raises:
        MetadataError: it does not, or there is none.
    """
    grid = record.vsa_dit_seq_shape
    if grid is None:
        raise MetadataError(
            f"FASTVIDEO_VSA needs vsa_dit_seq_shape = (T, H, W) in the record, found none for {tokens} "
            f"tokens: state the grid of the video's tokens. {INSTEAD}"
        )
    if len(grid) != 3 or min(grid) < 1 or math.prod(grid) != tokens:
        raise MetadataError(
            f"FASTVIDEO_VSA needs vsa_dit_seq_shape = (T, H, W) with T * H * W = {tokens} tokens, found "
            f"{by(grid)} = {math.prod(grid)}: state the grid after patchify. {INSTEAD}"
        )
    return grid


def by(extent: tuple[int, ...]) -> str:
    """An extent in words."""
    return " x ".join(map(str, extent))
