"""Attention with summary keys from its formula: float64, one token at a time, nothing shared with ours."""

from __future__ import annotations

import math

import torch

from tests.ops.vsa_oracle import Blocks, Selection, means_of, scores_of, selection_of, softmax_over


def runs_of(tokens: int, size: int) -> list[list[int]]:
    """A sequence cut into runs, the last one as long as what is left."""
    return [list(range(start, min(start + size, tokens))) for start in range(0, tokens, size)]


def with_summaries(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_blocks: Blocks,
    key_blocks: Blocks,
    selection: Selection,
    scale: float,
) -> torch.Tensor:
    """float64 [B, Sq, H, Dv]: tokens of selected blocks, and of each other block its mean with ln(n) on its score."""
    query, key, value = (x.detach().cpu().double() for x in (query, key, value))
    mean_keys, mean_values = means_of(key, key_blocks), means_of(value, key_blocks)
    batch, tokens, heads, _ = query.shape
    share = heads // key.shape[2]
    output = query.new_zeros(batch, tokens, heads, value.shape[-1])
    for b in range(batch):
        for h in range(heads):
            g = h // share
            for i, block in enumerate(query_blocks):
                keys, values, bias = [], [], []
                for j, members in enumerate(key_blocks):
                    if j in selection[b][h][i]:
                        keys += [key[b, y, g] for y in members]
                        values += [value[b, y, g] for y in members]
                        bias += [0.0] * len(members)
                    else:
                        keys.append(mean_keys[b, g, j])
                        values.append(mean_values[b, g, j])
                        bias.append(math.log(len(members)))
                for x in block:
                    scores = scale * (torch.stack(keys) * query[b, x, h]).sum(-1) + torch.tensor(
                        bias, dtype=torch.float64
                    )
                    output[b, x, h] = softmax_over(scores, torch.stack(values))
    return output


def block_summary_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int, topk: int, scale: float
) -> torch.Tensor:
    """The whole method over runs of `size` tokens, `topk` of them selected by their means."""
    query, key, value = (x.detach().cpu().double() for x in (query, key, value))
    blocks = runs_of(query.shape[1], size), runs_of(key.shape[1], size)
    selection = selection_of(scores_of(query, key, *blocks, scale), topk)
    return with_summaries(query, key, value, *blocks, selection, scale)
