"""prefix_dense_topk: a prefix that everybody sees and that sees everybody, and the best video blocks beside it."""

from __future__ import annotations

import torch

from omni_attn.errors import MetadataError
from omni_attn.ops.block_sparse.block_map import all_blocks, rankable
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.kernels import kernels_for
from omni_attn.ops.block_sparse.selectors import mean_topk


def prefix_dense_topk(
    scores: torch.Tensor, prefix_blocks: int, topk: int, *, compete: bool = False
) -> SelectedBlocks:
    """Every prefix block and the `topk` best video blocks of each video row; all blocks of each prefix row.

    The rule of VSA on MiniMax-H3 (FastVideo's video_sparse_attn_h3). A row with a NaN or an infinity takes the first
    blocks that it may choose from; among equals the lowest block index.

    Args:
        scores: [B, H, rows, blocks] between block means, the prefix blocks first; rows are all blocks, or the video's
            alone.
        prefix_blocks: P, number of the prefix blocks; topk: video blocks per video row, more than there are = all.
        compete: prefix blocks have no privilege as keys: video rows keep their P + topk best of all blocks.

    Returns:
        Lists of P + topk blocks for video rows and of all blocks for prefix rows; the places behind them hold -1.

    Raises:
        MetadataError: the rows are neither all blocks nor the video's, or prefix_blocks or topk is out of range.
    """
    batch, heads, rows, blocks = scores.shape
    video_blocks = blocks - prefix_blocks
    if rows not in (blocks, video_blocks) or not 0 <= prefix_blocks <= blocks or topk < 1:
        raise MetadataError(
            "prefix_dense_topk needs a row for each block or for each video block, no more prefix blocks than blocks, "
            f"and topk from 1 on; found {rows} rows of {blocks} blocks, {prefix_blocks} of the prefix, topk {topk}"
        )
    if topk >= video_blocks:
        return all_blocks((batch, heads, rows, blocks), scores.device)
    dense_rows = rows - video_blocks
    if (kernels := kernels_for(scores.detach())) is not None:
        return kernels.prefix_dense_topk(  # type: ignore[no-any-return]
            scores.detach(), prefix_blocks, topk, dense_rows, compete=compete
        )
    video_rows = scores[:, :, dense_rows:]
    kept = prefix_blocks + topk
    if compete:
        chosen = mean_topk(rankable(video_rows), kept).indices
    else:
        of_video = mean_topk(rankable(video_rows[..., prefix_blocks:]), topk).indices + prefix_blocks
        prefix = torch.arange(prefix_blocks, dtype=torch.int32, device=scores.device)
        chosen = torch.cat([prefix.expand(*of_video.shape[:-1], -1), of_video], dim=-1)
    if dense_rows == 0:
        counts = torch.full(chosen.shape[:-1], kept, dtype=torch.int32, device=scores.device)
        return SelectedBlocks(chosen, counts)
    indices, counts = all_blocks((batch, heads, rows, blocks), scores.device)
    indices[:, :, dense_rows:] = -1
    indices[:, :, dense_rows:, :kept] = chosen
    counts[:, :, dense_rows:] = kept
    return SelectedBlocks(indices, counts)
