"""Gradients of block-sparse attention in Triton: query from its lists of keys, key and value from lists of queries.

With P = exp(scale * q k - lse) and delta = sum(grad_out * out) of each query row (the way of FlashAttention 2, arXiv
2307.08691): grad_v = P^T grad_out, dS = P * (grad_out v^T - delta), grad_q = scale * dS k, grad_k = scale * dS^T q.

`grad_query_kernel` comes first: it reads queries in sequence order, and leaves behind, as packed rows, what
`grad_key_kernel` reads again and again. Both write each gradient once, in sequence order, and add in a fixed order: the
same call gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.triton_grad_kernels import grad_key_kernel, grad_query_kernel
from omni_attn.ops.block_sparse.triton_groups import list_key_groups, list_query_groups, row_tiles
from omni_attn.ops.block_sparse.triton_pack import GROUP, first_rows, pack_rows
from omni_attn.ops.layout import on_device, shared_memory, unit_stride


class Tile(NamedTuple):
    """How a kernel is cut: rows that stay (of queries or of keys), rows of one step, warps, pipeline stages."""

    rows: int
    step: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """The cuts of grad_query_kernel and of grad_key_kernel."""

    query: Tile
    key: Tile


def attend_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    grad_output: torch.Tensor,
    lse: torch.Tensor,
    selected: SelectedBlocks,
    query_blocks: BlockPartition,
    key_blocks: BlockPartition,
    softmax_scale: float,
    *,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query [B, Sq, H, D], key [B, Sk, G, D] and value [B, Sk, G, Dv], in their shapes and dtypes.

    Args:
        output: [B, Sq, H, Dv], of the attention alone, without a coarse term.
        grad_output: [B, Sq, H, Dv].
        lse: float32 [B, H, Sq], log-sum-exp of the scaled scores (natural log); -inf for rows without a key.

    All in sequence order. Rows without a key, and keys that nobody selected, get zeros. Nothing waits for the device.
    """
    tiles = tiles or default_tiles(query, value.shape[-1], query_blocks.capacity, key_blocks.capacity)
    with on_device(query):
        key_rows, value_rows = (pack_rows(unit_stride(x), key_blocks, means=False)[0] for x in (key, value))
        assert key_rows is not None and value_rows is not None
        grad_query, rows = _grad_query(
            query, key_rows, value_rows, output, grad_output, lse, selected, query_blocks, key_blocks,
            softmax_scale, tiles.query,
        )  # fmt: skip
        grad_key, grad_value = _grad_key(
            rows, key_rows, value_rows, selected, query_blocks, key_blocks, softmax_scale, tiles.key
        )
    return grad_query, grad_key, grad_value


class _QueryRows(NamedTuple):
    """Packed rows: query [B, H, rows, D], grad [B, H, rows, Dv], and float32 [B, H, rows] lse (base 2) and delta."""

    query: torch.Tensor
    grad: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


def _grad_query(
    query: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    output: torch.Tensor,
    grad_output: torch.Tensor,
    lse: torch.Tensor,
    selected: SelectedBlocks,
    query_blocks: BlockPartition,
    key_blocks: BlockPartition,
    softmax_scale: float,
    tile: Tile,
) -> tuple[torch.Tensor, _QueryRows]:
    query, grad_output = unit_stride(query), unit_stride(grad_output)
    batch, tokens, heads, size = query.shape
    value_size = value_rows.shape[-1]
    num_rows = first_rows(query_blocks)[1]
    packed_lse = torch.empty(batch, heads, num_rows, dtype=torch.float32, device=query.device)
    rows = _QueryRows(
        query.new_empty(batch, heads, num_rows, size),
        grad_output.new_empty(batch, heads, num_rows, value_size),
        packed_lse,
        torch.empty_like(packed_lse),
    )
    gradient = query.new_empty(batch, tokens, heads, size)
    keys = list_key_groups(selected, key_blocks, tile.step)
    items = row_tiles(query_blocks, tile.rows)
    grad_query_kernel[(items.shape[0], heads, batch)](
        query,
        key_rows,
        value_rows,
        output.contiguous(),
        grad_output,
        lse.contiguous(),
        gradient,
        *rows,
        *keys,
        query_blocks.order,
        items,
        *query.stride()[:3],
        *grad_output.stride()[:3],
        num_rows,
        key_rows.shape[2],
        query_blocks.num_blocks,
        tokens,
        keys.entries.shape[-1],
        softmax_scale,
        heads // key_rows.shape[1],
        BLOCK_M=tile.rows,
        BLOCK_N=tile.step,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **_constants(key_rows, value_rows),
    )
    return gradient, rows


def _grad_key(
    rows: _QueryRows,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    selected: SelectedBlocks,
    query_blocks: BlockPartition,
    key_blocks: BlockPartition,
    softmax_scale: float,
    tile: Tile,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, groups, num_rows, size = key_rows.shape
    heads_per_group = rows.query.shape[1] // groups
    grad_key = key_rows.new_empty(batch, key_blocks.tokens, groups, size)
    grad_value = value_rows.new_empty(batch, key_blocks.tokens, groups, value_rows.shape[-1])
    queries = list_query_groups(selected, query_blocks, key_blocks.num_blocks, tile.step)
    items = row_tiles(key_blocks, tile.rows)
    # Some key blocks are on many lists. They come first, or the last of them would run alone in the end.
    lengths = queries.lengths.view(batch, groups, heads_per_group, -1).sum(2)
    launch = lengths.index_select(-1, items[:, 0]).argsort(dim=-1, descending=True).to(torch.int32)
    grad_key_kernel[(items.shape[0], groups, batch)](
        *rows,
        key_rows,
        value_rows,
        grad_key,
        grad_value,
        queries.entries,
        queries.starts,
        launch,
        key_blocks.order,
        items,
        rows.query.shape[2],
        num_rows,
        key_blocks.num_blocks,
        key_blocks.tokens,
        softmax_scale,
        heads_per_group,
        BLOCK_M=tile.step,
        BLOCK_N=tile.rows,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **_constants(key_rows, value_rows),
    )
    return grad_key, grad_value


def _constants(key_rows: torch.Tensor, value_rows: torch.Tensor) -> dict[str, int | str]:
    size, value_size = key_rows.shape[-1], value_rows.shape[-1]
    return {
        "D": size,
        "DV": value_size,
        "BLOCK_D": max(GROUP, triton.next_power_of_2(size)),
        "BLOCK_V": max(GROUP, triton.next_power_of_2(value_size)),
        "GROUP": GROUP,
        "PRECISION": "ieee" if key_rows.dtype == torch.float32 else "tf32",
    }


# Tried from the top; the first that fits a GPU's shared memory is taken. Registers bound them too: each thread holds
# its part of one accumulator (query) or two (key) and of two tiles of scores, and float32 products run on ordinary
# cores, with both operands in registers. Compiled by Triton 3.6 for sm_90, the kernels for half precision and head
# sizes up to 128 spill at most 16 bytes a thread.
_QUERY_TILES = {
    "half": (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1)),
    "half, large heads": (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)),
    "float32": (Tile(32, 16, 4, 2), Tile(16, 16, 4, 1)),
    "float32, large heads": (Tile(32, 16, 8, 2), Tile(16, 16, 4, 1)),
}
_KEY_TILES = _QUERY_TILES | {"half": (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1))}


def default_tiles(query: torch.Tensor, value_size: int, query_capacity: int, key_capacity: int) -> Tiles:
    """The cuts for tensors like these, and blocks of these capacities."""
    size = query.shape[-1]
    kind = "float32" if query.dtype == torch.float32 else "half"
    if max(size, value_size) > 128:
        kind += ", large heads"
    row = query.element_size() * (triton.next_power_of_2(size) + triton.next_power_of_2(value_size))
    room = shared_memory(query.device)

    def fitting(tiles: tuple[Tile, ...], capacity: int) -> Tile:
        fits = (t for t in tiles if (t.rows + t.num_stages * t.step) * row + 2048 <= room)
        whole = max(GROUP, triton.next_power_of_2(capacity))
        sensible = (t for t in fits if t.rows <= max(64, whole))
        tile = next(sensible, tiles[-1])
        return tile._replace(rows=min(tile.rows, whole))

    return Tiles(fitting(_QUERY_TILES[kind], query_capacity), fitting(_KEY_TILES[kind], key_capacity))
