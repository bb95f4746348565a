"""Video sparse attention (VSA, arXiv 2505.13389): coarse attention between tiles selects the tiles for a fine one."""

from __future__ import annotations

import torch

from omni_attn.ops.block_sparse.executor import CoarseTerm, Executor, SelectedBlocks
from omni_attn.ops.block_sparse.gradients import needs_gradients
from omni_attn.ops.block_sparse.means import BlockMeans, coarse_attention, coarse_scores
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.selectors import mean_topk


def video_sparse_attention(
    executor: Executor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: BlockPartition,
    topk: int,
    softmax_scale: float,
    *,
    gate: torch.Tensor | None = None,
    coarse: bool = False,
) -> torch.Tensor:
    """of + gate * oc: attention over the topk tiles of each query tile, plus the gated attention between tile means.

    Args:
        query, key, value: [B, S, H or G, D] in raster order.
        tiles: the partition of the S tokens.
        topk: key tiles per query tile and head, 1..tiles.
        gate: [B, S, H, Dv], multiplied with the coarse output.
        coarse: without a gate, add the coarse output as it is; False = sparse attention only.

    Returns:
        [B, S, H, Dv] in raster order and query's dtype.
    """
    packed = executor.pack(query, key, value, tiles, tiles)
    selected, term = select_tiles(packed.means, topk, softmax_scale, query.dtype, gate=gate, coarse=coarse)
    return executor.attend(packed, selected, softmax_scale, term)


def select_tiles(
    means: BlockMeans,
    topk: int,
    softmax_scale: float,
    dtype: torch.dtype,
    *,
    gate: torch.Tensor | None = None,
    coarse: bool = False,
) -> tuple[SelectedBlocks, CoarseTerm | None]:
    """What the coarse branch decides and adds, from the means of tiles of tokens in `dtype`; the rest is as above."""
    with torch.no_grad():  # a selection has no gradient, and is the same with and without autograd
        scores = coarse_scores(means.query, means.key, softmax_scale)
        selected = mean_topk(scores, topk)
    if gate is None and not coarse:
        return selected, None
    if needs_gradients(*means):
        scores = coarse_scores(means.query, means.key, softmax_scale)
    return selected, CoarseTerm(coarse_attention(scores, means.value, dtype), gate)
