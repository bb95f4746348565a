"""RainFusion: attention of each query block over the key blocks that matter to it, without training."""

from __future__ import annotations

import torch

from omni_attn.ops.block_sparse.executor import Executor, SelectedBlocks
from omni_attn.ops.block_sparse.means import BlockMeans, coarse_scores
from omni_attn.ops.block_sparse.rainfusion import RainFusionBlocks
from omni_attn.ops.block_sparse.selectors import blocks_kept
from omni_attn.ops.block_sparse.threshold_selector import rf_softmax_threshold


def rainfusion_attention(
    executor: Executor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: RainFusionBlocks,
    sparsity: float,
    softmax_scale: float,
) -> torch.Tensor:
    """Attention over the selected blocks, [B, S, H, Dv] in sequence order and query's dtype.

    Args:
        query, key, value: [B, S, H or G, D], the tokens in use.
        blocks: the partition of these S tokens.
        sparsity: share of the key blocks that a query block leaves out; protected ones never are.
    """
    packed = executor.pack(query, key, value, blocks.partition, blocks.partition)
    selected = select_rainfusion_blocks(packed.means, blocks, sparsity, softmax_scale)
    return executor.attend(packed, selected, softmax_scale)


def select_rainfusion_blocks(
    means: BlockMeans, blocks: RainFusionBlocks, sparsity: float, softmax_scale: float
) -> SelectedBlocks:
    """The key blocks of each query block, from the means of the partition's blocks; the rest is as above."""
    # A choice has no gradient.
    scores = coarse_scores(means.query.detach(), means.key.detach(), softmax_scale)
    keep = blocks_kept(sparsity, blocks.partition.num_blocks)
    return rf_softmax_threshold(scores, keep, blocks.protected)
