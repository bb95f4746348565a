"""Video sparse attention of MiniMax-H3 (VSA-H3), an override of FASTVIDEO_VSA for sequences with more than a video.

Segments before the video (text, conditions, audio) are cut into chunks as large as a tile, none across two segments.
They see everything, and are seen by everything; the budget counts tiles of the video alone. After FastVideo's
`video_sparse_attn_h3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import ClassVar

import torch

from omni_attn.backends.fastvideo_vsa import FastVideoVSAImpl
from omni_attn.backends.fastvideo_vsa_builder import (
    FastVideoVSAMetadata,
    FastVideoVSAMetadataBuilder,
    by,
)
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.sparse_sequence import INSTEAD, dense_over, laid_out_tokens
from omni_attn.errors import MetadataError
from omni_attn.ops.operators import is_traced
from omni_attn.ops.video_sparse import add_coarse_attention
from omni_attn.ops.video_tiles import Extent, extent_of, video_tiles


class MiniMaxH3VSAMetadataBuilder(FastVideoVSAMetadataBuilder):
    """Reads the segments and the target video from the record's video_layout.

    Where all tiles are kept, the fine part is dense attention, and the coarse term is added all the same: checkpoints
    with gates were trained that way.
    """

    reads: ClassVar[frozenset[str]] = (  # type: ignore[misc]
        FastVideoVSAMetadataBuilder.reads - {"preserve_vsa_all_blocks"}
    ) | {"video_layout"}

    def read_sequence(self, record: AttentionMetadata, used: int) -> tuple[tuple[int, ...], Extent, int]:
        """See FastVideoVSAMetadataBuilder. The target is the layout's last span; spans before it count as segments.

        Raises:
            MetadataError: there is no layout, one without a video, or one that ends elsewhere than the call.
        """
        layout = record.video_layout
        if layout is None or not layout.spans:
            found = "none" if layout is None else "one without spans"
            raise MetadataError(
                f"FASTVIDEO_VSA on MiniMax-H3 needs a video_layout whose last span is the target video, found {found} "
                f"for {used} tokens: state it in the record (MiniMaxH3Model.attention_records). {INSTEAD}"
            )
        if record.vsa_dit_seq_shape not in (None, layout.spans[-1]):
            raise MetadataError(
                f"FASTVIDEO_VSA on MiniMax-H3: vsa_dit_seq_shape is {by(record.vsa_dit_seq_shape)}, and the last span "
                f"of video_layout {by(layout.spans[-1])}: leave out the first"
            )
        used = laid_out_tokens(record, used, "FASTVIDEO_VSA on MiniMax-H3")
        before = (*layout.prefix_segments, *map(prod, layout.spans[:-1]))
        return tuple(filter(None, before)), layout.spans[-1], used

    def attend_to_all(
        self, record: AttentionMetadata, made: FastVideoVSAMetadata, every: str
    ) -> FastVideoVSAMetadata:
        """See FastVideoVSAMetadataBuilder."""
        why = f"{every}: dense attention, with the coarse term where there is a gate"
        return replace(made, route="VSA_ALL_BLOCKS", route_reason=why, dense=dense_over(made.used))


class MiniMaxH3VSAImpl(FastVideoVSAImpl):
    """One layer of MiniMax-H3 on video sparse attention, as impl_overrides={"FASTVIDEO_VSA": MiniMaxH3VSAImpl}."""

    builder_cls: ClassVar[type[MiniMaxH3VSAMetadataBuilder]] = MiniMaxH3VSAMetadataBuilder

    def check_gate(self, gate: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See FastVideoVSAImpl; a gate of more tokens than the query, as alignment leaves it, is cut to its length."""
        longer = gate.dim() == query.dim() and gate.shape[1] > query.shape[1]
        return super().check_gate(gate[:, : query.shape[1]] if longer else gate, query, value)

    def attend_densely(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor | None,
        metadata: FastVideoVSAMetadata,
    ) -> torch.Tensor:
        """See FastVideoVSAImpl; with the coarse term."""
        output = super().attend_densely(query, key, value, gate, metadata)
        if metadata.route == "SDPA" or (gate is None and not self.adds_coarse):
            return output
        used = query.shape[1] if metadata.used is None else metadata.used
        numbers = (metadata.grid, metadata.tile_size, metadata.segments, used, self.softmax_scale)
        if is_traced(query):
            return torch.ops.omni_attn.minimax_h3_add_coarse(  # type: ignore[no-any-return]
                output, query, key, value, gate, *numbers
            )
        return _add_coarse(output, query, key, value, gate, *numbers)


def _add_coarse(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    grid: Extent,
    tile_size: Extent,
    segments: tuple[int, ...],
    used: int,
    softmax_scale: float,
) -> torch.Tensor:
    """The output [B, S, H, Dv] with the coarse term of its first `used` tokens, in new memory."""
    tiles = video_tiles(grid, tile_size, query.device, segments)
    rest = output[:, used:]
    output, query, key, value = (tensor[:, :used] for tensor in (output, query, key, value))
    gate = None if gate is None else gate[:, :used]
    added = add_coarse_attention(output, query, key, value, tiles, softmax_scale, gate)
    return torch.cat([added, rest], dim=1) if rest.shape[1] else added


@torch.library.custom_op("omni_attn::minimax_h3_add_coarse", mutates_args=())
def _add_coarse_operator(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    grid: Sequence[int],
    tile_size: Sequence[int],
    segments: Sequence[int],
    used: int,
    softmax_scale: float,
) -> torch.Tensor:
    extents = (extent_of(grid), extent_of(tile_size))
    return _add_coarse(output, query, key, value, gate, *extents, tuple(segments), used, softmax_scale)


@_add_coarse_operator.register_fake
def _(output: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(output)


class MiniMaxH3CompetingVSAMetadataBuilder(MiniMaxH3VSAMetadataBuilder):
    """Segments before the video are ranked with its tiles, in a budget that is larger by their number."""

    compete: ClassVar[bool] = True


class MiniMaxH3CompetingVSAImpl(MiniMaxH3VSAImpl):
    """VSA-H3 in which segments before the video have no privilege as keys: FastVideo's ablation."""

    builder_cls: ClassVar[type[MiniMaxH3VSAMetadataBuilder]] = MiniMaxH3CompetingVSAMetadataBuilder
