"""Video sparse attention (VSA, arXiv 2505.13389): coarse attention between tiles selects the tiles for a fine one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omni_attn.ops.autocast import without_autocast
from omni_attn.ops.block_sparse.executor import CoarseTerm, Executor, SelectedBlocks, add_coarse
from omni_attn.ops.block_sparse.gradients import needs_gradients
from omni_attn.ops.block_sparse.means import BlockMeans, block_means, coarse_attention, coarse_scores
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.prefix_selector import prefix_dense_topk
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
    prefix_blocks: int = 0,
    compete: bool = False,
) -> torch.Tensor:
    """of + gate * oc: attention over the best tiles of each query tile, plus the gated attention between tile means.

    Args:
        query, key, value: [B, S, H or G, D] in the order of the sequence.
        tiles: the partition of the S tokens.
        topk: key tiles per query tile and head, 1..tiles of the video.
        gate: [B, S, H, Dv], multiplied with the coarse output.
        coarse: without a gate, add the coarse output as it is; False = sparse attention only.
        prefix_blocks: how many blocks of the partition lie before the video's tiles, and hold the first tokens. They
            see everything, and each tile sees them beside its topk.
        compete: blocks before the video are ranked with its tiles: a tile sees its prefix_blocks + topk best of all.

    Returns:
        [B, S, H, Dv] in the order of the sequence and query's dtype.
    """
    # What sees everything needs no lists, which would be as long as the sequence: dense attention serves it.
    before = sum(tiles.sizes[:prefix_blocks])
    of_video = tiles.behind(prefix_blocks) if before else tiles
    packed = executor.pack(query[:, before:], key, value, of_video, tiles)
    selected, term = select_tiles(
        packed.means,
        topk,
        softmax_scale,
        query.dtype,
        gate=None if gate is None else gate[:, before:],
        coarse=coarse,
        prefix_blocks=prefix_blocks,
        compete=compete,
    )
    output = executor.attend(packed, selected, softmax_scale, term)
    if not before:
        return output
    prefix = _attend_all(query[:, :before], key, value, softmax_scale)
    if term is not None:
        chunks = tiles.first(prefix_blocks)
        means = packed.means._replace(query=block_means(query[:, :before], chunks))
        gate = None if gate is None else gate[:, :before]
        prefix = add_coarse(prefix, _coarse_term(means, softmax_scale, query.dtype, gate), chunks)
    return torch.cat([prefix, output], dim=1)


def select_tiles(
    means: BlockMeans,
    topk: int,
    softmax_scale: float,
    dtype: torch.dtype,
    *,
    gate: torch.Tensor | None = None,
    coarse: bool = False,
    prefix_blocks: int = 0,
    compete: bool = False,
) -> tuple[SelectedBlocks, CoarseTerm | None]:
    """What the coarse branch decides and adds, from the means of tiles of tokens in `dtype`; the rest is as above.

    The query means are those of all blocks, or those of the video's tiles alone.
    """
    with torch.no_grad():  # a selection has no gradient, and is the same with and without autograd
        scores = coarse_scores(means.query, means.key, softmax_scale)
        if prefix_blocks:
            selected = prefix_dense_topk(scores, prefix_blocks, topk, compete=compete)
        else:
            selected = mean_topk(scores, topk)
    if gate is None and not coarse:
        return selected, None
    return selected, _coarse_term(means, softmax_scale, dtype, gate, scores)


def add_coarse_attention(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: BlockPartition,
    softmax_scale: float,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    """output + gate * oc, for an output [B, S, H, Dv] that something else computed; without a gate, output + oc."""
    means = BlockMeans(*(block_means(tensor, tiles) for tensor in (query, key, value)))
    return add_coarse(output, _coarse_term(means, softmax_scale, output.dtype, gate), tiles)


def _attend_all(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """Dense attention [B, Sq, H, Dv] of some tokens over all."""
    grouped = query.shape[2] != key.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    with without_autocast(query):
        output = F.scaled_dot_product_attention(query, key, value, scale=softmax_scale, enable_gqa=grouped)
    return output.transpose(1, 2)


def _coarse_term(
    means: BlockMeans,
    softmax_scale: float,
    dtype: torch.dtype,
    gate: torch.Tensor | None,
    scores: torch.Tensor | None = None,
) -> CoarseTerm:
    """The coarse output with its gate; scores that were made without gradients serve where none are asked for."""
    if scores is None or needs_gradients(*means):
        scores = coarse_scores(means.query, means.key, softmax_scale)
    return CoarseTerm(coarse_attention(scores, means.value, dtype), gate)
