"""Block-sparse attention in plain torch: any device, dtype and block size, with gradients."""

from __future__ import annotations

from typing import ClassVar

import torch

from omni_attn.ops.autocast import without_autocast
from omni_attn.ops.block_sparse.executor import (
    CoarseTerm,
    Packed,
    SelectedBlocks,
    SummarisingExecutor,
    add_coarse,
)
from omni_attn.ops.block_sparse.means import BlockMeans, block_means
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.selection import block_map

#: Elements of the scores, the keys or the values that one chunk of query blocks may have: 64 MiB in float32.
_CHUNK_ELEMENTS = 2**24


class TorchExecutor(SummarisingExecutor):
    """Gathers the selected key blocks of some query blocks at a time."""

    name: ClassVar[str] = "torch"
    differentiable: ClassVar[bool] = True

    def pack(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> Packed:
        """See Executor.pack; tensors are [B, H, blocks, capacity, D] views."""
        means = BlockMeans(
            block_means(query, query_blocks), block_means(key, key_blocks), block_means(value, key_blocks)
        )
        tensors = tuple(
            _blocks_of(blocks.pack(x), blocks)
            for x, blocks in ((query, query_blocks), (key, key_blocks), (value, key_blocks))
        )
        return Packed(means, query_blocks, key_blocks, tensors)

    def attend(
        self,
        packed: Packed,
        selected: SelectedBlocks,
        softmax_scale: float,
        coarse: CoarseTerm | None = None,
    ) -> torch.Tensor:
        """See Executor.attend; scores and sums are float32 or wider."""
        fine = _attend(packed, selected, softmax_scale, summaries=False)
        output = add_coarse(fine, coarse, packed.query_blocks)
        return output.to(packed.tensors[0].dtype).contiguous()

    def attend_with_summaries(
        self, packed: Packed, selected: SelectedBlocks, softmax_scale: float
    ) -> torch.Tensor:
        """See SummarisingExecutor; the means are as wide as the scores."""
        output = _attend(packed, selected, softmax_scale, summaries=True)
        return output.to(packed.tensors[0].dtype).contiguous()


def _attend(
    packed: Packed, selected: SelectedBlocks, softmax_scale: float, *, summaries: bool
) -> torch.Tensor:
    """[B, Sq, H, Dv] in float32 or wider, some query blocks at a time."""
    query, _, value = packed.tensors
    batch, heads, _, capacity, size = query.shape
    keys = selected.indices.shape[-1] * packed.key_blocks.capacity
    keys += packed.key_blocks.num_blocks if summaries else 0
    widest = max(capacity, size, value.shape[-1])
    chunk = max(1, _CHUNK_ELEMENTS // max(1, batch * heads * keys * widest))
    rows = [
        _attend_rows(packed, selected, softmax_scale, slice(start, start + chunk), summaries)
        for start in range(0, packed.query_blocks.num_blocks, chunk)
    ]
    slots = torch.cat(rows, dim=2).permute(0, 2, 3, 1, 4).flatten(1, 2)
    return packed.query_blocks.unpack(slots)


def _blocks_of(packed: torch.Tensor, blocks: BlockPartition) -> torch.Tensor:
    """[B, blocks * capacity, H, D] -> [B, H, blocks, capacity, D]."""
    batch, _, heads, size = packed.shape
    return packed.view(batch, blocks.num_blocks, blocks.capacity, heads, size).permute(0, 3, 1, 2, 4)


def _attend_rows(
    packed: Packed, selected: SelectedBlocks, scale: float, rows: slice, summaries: bool
) -> torch.Tensor:
    """The query blocks `rows`: [B, H, rows, capacity, Dv] in float32 or wider."""
    query, key, value = packed.tensors
    query = query[:, :, rows]
    indices, counts = selected.indices[:, :, rows].long(), selected.counts[:, :, rows]
    cap, wide = indices.shape[-1], torch.promote_types(query.dtype, torch.float32)
    chosen = torch.arange(cap, device=indices.device) < counts[..., None]
    indices = indices.where(chosen, 0)

    slots = torch.arange(packed.key_blocks.capacity, device=indices.device)
    seen = chosen[..., None] & (slots < packed.key_blocks.block_sizes[indices][..., None])
    seen = seen.flatten(3)[..., None, :]  # [B, H, rows, 1, keys]
    # Zeros where nothing is chosen: a weight of zero does not silence a NaN, nor does a gradient of zero.
    keys, values = (
        _gather(x, indices, query.shape[1]).to(wide).masked_fill(~seen.mT, 0.0) for x in (key, value)
    )

    with without_autocast(query):
        scores = (query.to(wide) @ keys.mT * scale).masked_fill(~seen, float("-inf"))
        if summaries:
            unselected = ~block_map(
                SelectedBlocks(selected.indices[:, :, rows], counts), packed.key_blocks.num_blocks
            )
            return _with_summaries(packed, query.to(wide), scores, values, unselected, scale)
        # A row of -inf alone would be NaN; it has no key, and its weights are zeros.
        weights = scores.softmax(-1).where(seen.any(-1, keepdim=True), 0.0)
        output: torch.Tensor = weights @ values
    return output


def _with_summaries(
    packed: Packed,
    query: torch.Tensor,
    scores: torch.Tensor,
    values: torch.Tensor,
    unselected: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The softmax over scores [B, H, rows, capacity, keys] and the means of the unselected blocks [B, H, rows, blocks].

    There is a key in every row: a block is selected, or it is not.
    """
    repeats = query.shape[1] // packed.means.key.shape[1]
    mean_keys, mean_values = (
        x.to(query.dtype).repeat_interleave(repeats, 1)[:, :, None] for x in packed.means[1:]
    )
    unselected = unselected[..., None, :]
    bias = packed.key_blocks.block_sizes.to(query.dtype).log()
    mean_scores = (query @ mean_keys.mT * scale + bias).masked_fill(~unselected, float("-inf"))
    weights = torch.cat([scores, mean_scores], dim=-1).softmax(-1)
    tokens = scores.shape[-1]
    output: torch.Tensor = weights[..., :tokens] @ values + weights[..., tokens:] @ mean_values
    return output


def _gather(blocks: torch.Tensor, indices: torch.Tensor, heads: int) -> torch.Tensor:
    """Blocks [B, G, n, E, D] by indices [B, H, rows, cap]: [B, H, rows, cap * E, D]."""
    batch, groups, _, capacity, size = blocks.shape
    rows, cap = indices.shape[2:]
    b = torch.arange(batch, device=indices.device)[:, None, None, None]
    g = (torch.arange(heads, device=indices.device) // (heads // groups))[None, :, None, None]
    gathered: torch.Tensor = blocks[b, g, indices].reshape(batch, heads, rows, cap * capacity, size)
    return gathered
