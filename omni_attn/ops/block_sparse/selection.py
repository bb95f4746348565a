"""A selection as a whole: which key blocks, of which partitions, and what is added to their attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from omni_attn.ops.block_sparse.executor import CoarseTerm, SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition


class BlockSelection(NamedTuple):
    """What one call of a block-sparse backend computes.

    Attributes:
        selected: key blocks of each query block and head.
        query_blocks, key_blocks: the partitions of the query's and the key's tokens.
        coarse: what is added to the attention over the selected blocks, None = nothing.
        summaries: each block that is not selected is one key in the same softmax, see SummarisingExecutor.
    """

    selected: SelectedBlocks
    query_blocks: BlockPartition
    key_blocks: BlockPartition
    coarse: CoarseTerm | None = None
    summaries: bool = False


def block_map(selected: SelectedBlocks, num_key_blocks: int) -> torch.Tensor:
    """bool [B, H, query blocks, key blocks]: True where a block is selected."""
    indices, counts = selected
    places = torch.arange(indices.shape[-1], device=indices.device)
    # What lies behind the count goes into one column more, which is left out.
    columns = indices.long().where(places < counts[..., None], num_key_blocks)
    chosen = torch.zeros(*counts.shape, num_key_blocks + 1, dtype=torch.bool, device=indices.device)
    return chosen.scatter_(-1, columns, True)[..., :num_key_blocks]


def token_pairs(selection: BlockSelection) -> torch.Tensor:
    """int64 [B, H]: pairs of a query token and a key token whose blocks are selected for one another."""
    chosen = block_map(selection.selected, selection.key_blocks.num_blocks)
    keys = (chosen * selection.key_blocks.block_sizes.long()).sum(-1)
    return (keys * selection.query_blocks.block_sizes.long()).sum(-1)
