"""Attention over the best key blocks of each query block, with one summary key for each of the others.

Training-free, after h3-sparse-attn: what is far away is seen from afar instead of not at all.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from omni_attn.ops.block_sparse.executor import SelectedBlocks, SummarisingExecutor
from omni_attn.ops.block_sparse.kept import keep_captured
from omni_attn.ops.block_sparse.means import BlockMeans, coarse_scores
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.selectors import mean_topk


def block_summary_attention(
    executor: SummarisingExecutor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_size: int,
    topk: int,
    softmax_scale: float,
) -> torch.Tensor:
    """Attention of each query token over its block's `topk` best key blocks, and over the means of all others.

    A block of n tokens that is not selected is one key in the same softmax: the mean of its keys, whose scaled score
    gains ln(n), with the mean of its values.

    Args:
        query: [B, Sq, H, D], in the order of its sequence.
        key, value: [B, Sk, G, D] and [B, Sk, G, Dv].
        block_size: tokens of a block, which is a run of the sequence; the last one holds what is left.
        topk: key blocks per query block and head, from 1 on; those with the highest scores between means.

    Returns:
        [B, Sq, H, Dv] in query's dtype.
    """
    query_blocks = raster_blocks(query.shape[1], block_size, query.device)
    key_blocks = raster_blocks(key.shape[1], block_size, key.device)
    packed = executor.pack(query, key, value, query_blocks, key_blocks)
    selected = select_by_means(packed.means, topk, softmax_scale)
    return executor.attend_with_summaries(packed, selected, softmax_scale)


def select_by_means(means: BlockMeans, topk: int, softmax_scale: float) -> SelectedBlocks:
    """The `topk` key blocks of each query block with the highest scores between means, among equals the first ones."""
    with torch.no_grad():  # a choice has no gradient
        return mean_topk(coarse_scores(means.query, means.key, softmax_scale), topk)


def raster_blocks(tokens: int, block_size: int, device: torch.device) -> BlockPartition:
    """A sequence as it lies, cut into blocks; kept for later calls.

    Not for compiled code, where the cache cannot be asked: call it inside an operator.

    Raises:
        MetadataError: the first call for a length lies inside a CUDA-graph capture.
    """
    blocks = _raster_blocks(tokens, block_size, device)
    keep_captured(blocks, device)
    return blocks


@lru_cache(maxsize=64)
def _raster_blocks(tokens: int, block_size: int, device: torch.device) -> BlockPartition:
    with torch.inference_mode(False):  # kept tensors must serve calls with gradients too
        return BlockPartition.in_order(tokens, min(block_size, tokens), device)
