"""Means of blocks of tokens, in float32, and the coarse attention between them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from omni_attn.ops.autocast import without_autocast
from omni_attn.ops.block_sparse.kernels import kernels_for
from omni_attn.ops.block_sparse.partition import BlockPartition


class BlockMeans(NamedTuple):
    """Block means [B, H or G, blocks, D] in float32 (float64 of float64 tensors)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def block_means(tensor_BSHD: torch.Tensor, blocks: BlockPartition) -> torch.Tensor:
    """The mean over the tokens of each block, [B, H, blocks, D], summed and divided in float32 or wider."""
    if (kernels := kernels_for(tensor_BSHD)) is not None:
        return kernels.pack_rows(tensor_BSHD, blocks, write=False)[1]  # type: ignore[no-any-return]
    wide = tensor_BSHD.to(torch.promote_types(tensor_BSHD.dtype, torch.float32))
    sums = wide.new_zeros(wide.shape[0], blocks.num_blocks, *wide.shape[2:])
    sums = sums.index_add(1, blocks.block_of, wide)
    return (sums / blocks.block_sizes[:, None, None]).transpose(1, 2)


def coarse_scores(query_means: torch.Tensor, key_means: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """Scaled scores between block means, [B, H, query blocks, key blocks]; key heads repeat for query heads."""
    if (kernels := kernels_for(query_means, key_means)) is not None:
        return kernels.coarse_scores(query_means, key_means, softmax_scale)  # type: ignore[no-any-return]
    repeats = query_means.shape[1] // key_means.shape[1]
    with without_autocast(query_means):
        return query_means @ key_means.repeat_interleave(repeats, 1).mT * softmax_scale


def coarse_attention(
    scores: torch.Tensor, value_means: torch.Tensor, output_dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Softmax attention over block means, every block with the same weight: [B, H, query blocks, Dv].

    Args:
        output_dtype: what the sum that it goes into is rounded to; GPUs may take products of that accuracy.
    """
    if (kernels := kernels_for(scores, value_means)) is not None:
        return kernels.coarse_attention(scores, value_means, output_dtype)  # type: ignore[no-any-return]
    repeats = scores.shape[1] // value_means.shape[1]
    with without_autocast(scores):
        return scores.softmax(-1) @ value_means.repeat_interleave(repeats, 1)
