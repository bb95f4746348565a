"""subblock_lse_topk: blocks ranked by the attention between small cells of tokens inside them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from omni_attn.errors import MetadataError
from omni_attn.ops.autocast import without_autocast
from omni_attn.ops.block_sparse.block_map import all_blocks, rankable
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.selectors import mean_topk

#: Tokens of a cell.
CELL = 16
#: Budgets are multiples of this, where there are so many candidates.
_ROUNDING = 8
#: Elements of the scores between cells that one chunk of query blocks may have: 64 MiB in float32.
_CHUNK_ELEMENTS = 2**24


def subblock_budget(sparsity: float, candidates: int) -> int:
    """ceil((1 - sparsity) * candidates), at least 1, rounded up to a multiple of 8, at most all; 0 of none."""
    kept = max(1, math.ceil((1 - sparsity) * candidates))
    return min(candidates, _ROUNDING * math.ceil(kept / _ROUNDING))


def subblock_lse_topk(
    query: torch.Tensor,
    key: torch.Tensor,
    softmax_scale: float,
    sparsity: float,
    *,
    block_q: int = 64,
    block_k: int = 64,
    protected_kv_prefix: int = 0,
    cell: int = CELL,
) -> SelectedBlocks:
    """The key blocks that touch the protected prefix, and the best of the others: exactly so many in every row.

    Blocks are cut in sequence order, as BlockPartition.in_order does. Among equals the lowest block index wins; a row
    with a NaN or an infinity takes the first candidates.

    Args:
        query: [B, Sq, H, D]; key: [B, Sk, G, D], H a multiple of G.
        sparsity: share of the unprotected key blocks that is left out, before rounding; see `subblock_budget`.
        block_q, block_k: tokens of a query and of a key block, multiples of `cell`.
        protected_kv_prefix: so many tokens at the start are seen by every row; blocks that hold one of them stay whole.

    Raises:
        MetadataError: a block is no multiple of a cell, or the prefix is longer than the keys.
    """
    if block_q % cell or block_k % cell or not 0 <= protected_kv_prefix <= key.shape[1]:
        raise MetadataError(
            f"subblock_lse_topk needs blocks that are multiples of {cell} tokens, and a protected prefix of at most "
            f"{key.shape[1]} tokens; found blocks of {block_q} and {block_k}, a prefix of {protected_kv_prefix}"
        )
    rows, blocks = -(-query.shape[1] // block_q), -(-key.shape[1] // block_k)
    prefix = -(-protected_kv_prefix // block_k)
    budget = subblock_budget(sparsity, blocks - prefix)
    shape = (query.shape[0], query.shape[2], rows, blocks)
    if prefix + budget == blocks:
        return all_blocks(shape, query.device)
    scores = subblock_scores(query, key, softmax_scale, block_q=block_q, block_k=block_k, cell=cell)
    chosen = mean_topk(rankable(scores[..., prefix:]), budget).indices + prefix
    before = torch.arange(prefix, dtype=torch.int32, device=query.device)
    indices = torch.cat([before.expand(*shape[:3], -1), chosen], dim=-1)
    counts = torch.full(shape[:3], prefix + budget, dtype=torch.int32, device=query.device)
    return SelectedBlocks(indices, counts)


def subblock_scores(
    query: torch.Tensor, key: torch.Tensor, softmax_scale: float, *, block_q: int, block_k: int, cell: int
) -> torch.Tensor:
    """Log-sum-exp over the pairs of cells in each pair of blocks: [B, H, query blocks, key blocks], float32 or wider.

    A cell is the mean of its tokens, rounded to the inputs' dtype, the query's after it was multiplied by the scale. A
    cell behind the last token is no cell; one that holds some tokens counts like a whole one.
    """
    query, key = query.detach(), key.detach()
    wide = torch.promote_types(query.dtype, torch.float32)
    query_cells = (_cell_means(query, cell) * softmax_scale).to(query.dtype).to(wide)
    key_cells = _cell_means(key, cell).to(key.dtype).to(wide)
    key_cells = key_cells.repeat_interleave(query.shape[2] // key.shape[2], 1)
    per_row, per_block = block_q // cell, block_k // cell
    blocks = -(-key_cells.shape[2] // per_block)
    batch, heads = query_cells.shape[:2]
    chunk = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * per_row * key_cells.shape[2]))
    scores = []
    for start in range(0, query_cells.shape[2], chunk * per_row):
        part = query_cells[:, :, start : start + chunk * per_row]
        # Places without a cell add exp(-inf) = 0.
        with without_autocast(part):
            pairs = part @ key_cells.mT
        rows = -(-part.shape[2] // per_row)
        missing = (0, blocks * per_block - key_cells.shape[2], 0, rows * per_row - part.shape[2])
        pairs = F.pad(pairs, missing, value=float("-inf"))
        scores.append(pairs.view(batch, heads, rows, per_row, blocks, per_block).logsumexp((3, 5)))
    return torch.cat(scores, dim=2)


def _cell_means(tensor_BSHD: torch.Tensor, cell: int) -> torch.Tensor:
    """Means of runs of `cell` tokens, the last one as long as what is left: [B, H, cells, D], float32 or wider."""
    tokens = tensor_BSHD.shape[1]
    wide = torch.promote_types(tensor_BSHD.dtype, torch.float32)
    whole = tokens - tokens % cell
    shape = (tensor_BSHD.shape[0], whole // cell, cell, *tensor_BSHD.shape[2:])
    runs = tensor_BSHD[:, :whole].reshape(shape)
    means = [runs.mean(2, dtype=wide)]
    if whole < tokens:
        means.append(tensor_BSHD[:, whole:].mean(1, keepdim=True, dtype=wide))
    return torch.cat(means, dim=1).transpose(1, 2)
