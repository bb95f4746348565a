"""Small sparse calls with all that an inspection needs to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.selection import BlockSelection
from omni_attn.ops.video_sparse import select_tiles
from omni_attn.ops.video_tiles import Extent, video_tiles
from tests.inspection.stubs import EXECUTOR

SCALE = 0.4


@dataclass(frozen=True, eq=False)
class SparseCall:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    selection: BlockSelection

    @property
    def tiles(self) -> BlockPartition:
        return self.selection.query_blocks


def sparse_call(
    topk: int,
    *,
    grid: Extent = (3, 5, 4),
    tile: Extent = (2, 2, 3),
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    gated: bool = False,
    dtype: torch.dtype = torch.float64,
) -> SparseCall:
    """Video sparse attention of random tensors: ragged tiles, shared key heads."""
    generator = torch.Generator().manual_seed(3)
    tokens = grid[0] * grid[1] * grid[2]
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 6), (heads, 6))
    query, key, value, gate = (
        torch.randn(batch, tokens, *shape, generator=generator, dtype=dtype) for shape in shapes
    )
    tiles = video_tiles(grid, tile, torch.device("cpu"))
    packed = EXECUTOR.pack(query, key, value, tiles, tiles)
    selected, term = select_tiles(packed.means, topk, SCALE, dtype, gate=gate if gated else None)
    output = EXECUTOR.attend(packed, selected, SCALE, term)
    return SparseCall(query, key, value, output, BlockSelection(selected, tiles, tiles, term))
