"""Gradients of what blocks that are not selected add to a softmax as one key each, in plain torch.

With P = exp(scale * q km + ln n - lse) and delta = sum(grad_out * out) as in triton_backward, over one key per block
instead of all its tokens: few enough for matrix products of some query tokens at a time.
"""

from __future__ import annotations

import torch

from omni_attn.ops.autocast import without_autocast
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.selection import block_map

#: Elements of the scores between some query tokens and all means: 64 MiB in float32.
_CHUNK_ELEMENTS = 2**24


def summaries_backward(
    query: torch.Tensor,
    mean_keys: torch.Tensor,
    mean_values: torch.Tensor,
    output: torch.Tensor,
    grad_output: torch.Tensor,
    lse: torch.Tensor,
    selected: SelectedBlocks,
    query_blocks: BlockPartition,
    key_blocks: BlockPartition,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients by way of the summaries: of query [B, Sq, H, D], of the means [B, G, blocks, D] and [B, G, blocks, Dv].

    Args:
        output, grad_output: [B, Sq, H, Dv]; lse: [B, H, Sq]; all of the whole softmax, in sequence order.

    All float32.
    """
    batch, tokens, heads, _ = query.shape
    groups, blocks = mean_keys.shape[1:3]
    keys, values = (x.float().repeat_interleave(heads // groups, 1) for x in (mean_keys, mean_values))
    bias = key_blocks.block_sizes.float().log()
    chosen, block_of = block_map(selected, blocks), query_blocks.block_of
    grad_query = torch.empty_like(query, dtype=torch.float32)
    grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
    chunk = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * blocks))
    with without_autocast(query):
        for start in range(0, tokens, chunk):
            rows = slice(start, start + chunk)
            q, out, grad = (x[:, rows].transpose(1, 2).float() for x in (query, output, grad_output))
            weights = (q @ keys.mT * softmax_scale + bias - lse[:, :, rows, None]).exp()
            weights = weights.masked_fill(chosen.index_select(2, block_of[rows]), 0.0)
            delta = (grad * out).sum(-1, keepdim=True)
            grad_scores = weights * (grad @ values.mT - delta) * softmax_scale
            grad_query[:, rows] = (grad_scores @ keys).transpose(1, 2)
            grad_keys += grad_scores.mT @ q
            grad_values += weights.mT @ grad
    grad_keys, grad_values = (
        x.view(batch, groups, -1, *x.shape[2:]).sum(2) for x in (grad_keys, grad_values)
    )
    return grad_query, grad_keys, grad_values
