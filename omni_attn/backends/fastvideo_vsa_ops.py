"""Video sparse attention of one call by plain numbers, and the same as an operator, for graphs and fakes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_attn.backends import sparse_executors
from omni_attn.ops.block_sparse.executor import Executor
from omni_attn.ops.video_sparse import video_sparse_attention
from omni_attn.ops.video_tiles import Extent, chunk_sizes, extent_of, video_tiles


def attend_tiles(
    executor: Executor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    grid: Extent,
    tile_size: Extent,
    topk: int,
    softmax_scale: float,
    adds_coarse: bool,
    segments: tuple[int, ...] = (),
    compete: bool = False,
) -> torch.Tensor:
    """Video sparse attention of query [B, S, H, D] over key [B, S, G, D], value [B, S, G, Dv]: [B, S, H, Dv]."""
    return video_sparse_attention(
        executor,
        query,
        key,
        value,
        video_tiles(grid, tile_size, query.device, segments),
        topk,
        softmax_scale,
        gate=gate,
        coarse=adds_coarse,
        prefix_blocks=len(chunk_sizes(segments, tile_size)),
        compete=compete,
    )


@torch.library.custom_op("omni_attn::video_sparse_attention", mutates_args=())
def _video_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    grid: Sequence[int],
    tile_size: Sequence[int],
    topk: int,
    softmax_scale: float,
    adds_coarse: bool,
    segments: Sequence[int],
    compete: bool,
    executor: str,
) -> torch.Tensor:
    made = sparse_executors.make_executor(executor, f"FASTVIDEO_VSA ({executor})")
    extents = (extent_of(grid), extent_of(tile_size))
    numbers = (*extents, topk, softmax_scale, adds_coarse, tuple(segments), compete)
    return attend_tiles(made, query, key, value, gate, *numbers)


@_video_sparse_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])
