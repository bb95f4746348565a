"""Selectors: which key blocks each query block attends to. None of them waits for the device.

mean_topk              the best blocks by score (here)
prefix_dense_topk      the same for video blocks, with a dense prefix (prefix_selector)
subblock_lse_topk      the best blocks by the log-sum-exp of what lies inside (subblock_selector)
rf_softmax_threshold   RainFusion: all blocks from a threshold on (threshold_selector)
"""

from __future__ import annotations

import math

import torch

from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.kernels import kernels_for


def blocks_kept(sparsity: float, num_blocks: int) -> int:
    """ceil((1 - sparsity) * num_blocks) in float64 arithmetic, at least 1, at most all.

    The rounding of the float product is part of the rule: sparsity 0.7 of 10 blocks keeps 4, as FastVideo does.
    """
    return min(max(math.ceil((1 - sparsity) * num_blocks), 1), num_blocks)


def mean_topk(scores: torch.Tensor, topk: int) -> SelectedBlocks:
    """The `topk` highest scores of each row, exactly so many (at most all); among equals the lowest block index.

    Args:
        scores: [B, H, query blocks, key blocks] between block means.
    """
    topk = min(topk, scores.shape[-1])
    scores = scores.detach().contiguous()  # torch.sort answers in the layout it is asked in
    if (kernels := kernels_for(scores)) is not None:
        return kernels.mean_topk(scores, topk)  # type: ignore[no-any-return]
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    indices = order[..., :topk].sort(dim=-1).values.to(torch.int32)
    counts = torch.full(scores.shape[:-1], topk, dtype=torch.int32, device=scores.device)
    return SelectedBlocks(indices, counts)
