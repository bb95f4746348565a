"""The forward of block-sparse attention in Triton: how its kernel is cut and launched, see triton_attend."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from omni_attn.ops.block_sparse.executor import CoarseTerm, Packed, SelectedBlocks
from omni_attn.ops.block_sparse.kept import kept
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.triton_attend import attend_kernel
from omni_attn.ops.block_sparse.triton_groups import row_tiles
from omni_attn.ops.block_sparse.triton_lists import list_rows
from omni_attn.ops.block_sparse.triton_pack import GROUP
from omni_attn.ops.block_sparse.triton_select import float32_products
from omni_attn.ops.layout import INT32_MAX, on_device, shared_memory, unit_stride

_LOG2_E = 1.4426950408889634


class Tile(NamedTuple):
    """How the attention kernel is cut: query rows and key rows of one step, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, query: torch.Tensor, value_size: int) -> int:
        """Shared memory that the query tile and the stages of key and value take; float32 ones as two TF32 parts."""
        size: int = triton.next_power_of_2(query.shape[-1])
        both: int = size + triton.next_power_of_2(value_size)
        elements = self.block_m * size + self.num_stages * self.block_n * both
        return elements * (8 if query.dtype == torch.float32 else 2) + 2048


# Tried from the top, the first that fits a GPU's shared memory is taken. At head size 128 two tiles of the first kind
# run on one Hopper SM; of what was measured there, that is the fastest for every tile volume (benchmarks/notes).
_TILES = (Tile(64, 64, 4, 3), Tile(64, 32, 4, 3), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 16, 4, 1))


def attend(
    packed: Packed,
    selected: SelectedBlocks,
    softmax_scale: float,
    coarse: CoarseTerm | None = None,
    *,
    summaries: bool = False,
    with_lse: bool = False,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output [B, Sq, H, Dv] in sequence order, and, where asked, the log-sum-exp [B, H, Sq] (natural log).

    Args:
        summaries: every block that is not selected takes part as one key, see SummarisingExecutor.
    """
    query, _, _, key_rows, value_rows = packed.tensors
    query_blocks, key_blocks = packed.query_blocks, packed.key_blocks
    batch, tokens, heads, size = query.shape
    groups, value_size = value_rows.shape[1], value_rows.shape[-1]
    tile = tile or _tile(query, value_size, query_blocks.capacity)
    output = query.new_empty(batch, tokens, heads, value_size)
    lse = query.new_empty(batch, heads, tokens, dtype=torch.float32) if with_lse else None
    lists = list_rows(selected, key_blocks, tile.block_n, with_chosen=summaries)
    tiles = row_tiles(query_blocks, tile.block_m)
    gate = None if coarse is None or coarse.gate is None else unit_stride(coarse.gate)
    descriptors = _descriptors(key_rows, value_rows, tile.block_n)
    # What the kernel does not look at is any tensor.
    means = (
        (query,) * 4 if lists.chosen is None else (*_mean_rows(packed), log_sizes(key_blocks), lists.chosen)
    )
    with on_device(query):
        attend_kernel[(tiles.shape[0], heads, batch)](
            query,
            key_rows,
            value_rows,
            *(descriptors or (key_rows, value_rows)),
            output,
            query if lse is None else lse,
            query if gate is None else gate,
            query if coarse is None else coarse.output.contiguous(),
            *means,
            *lists[:3],
            query_blocks.order,
            tiles,
            *query.stride()[:3],
            *output.stride()[:3],
            *(output if gate is None else gate).stride()[:3],
            key_rows.shape[2],
            query_blocks.num_blocks,
            key_blocks.num_blocks,
            tokens,
            lists.chunks.shape[-1],
            lists.groups.shape[-1],
            softmax_scale * _LOG2_E,
            heads // groups,
            D=size,
            DV=value_size,
            BLOCK_D=max(16, triton.next_power_of_2(size)),
            BLOCK_V=max(16, triton.next_power_of_2(value_size)),
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            GROUP=GROUP,
            COARSE=coarse is not None,
            GATE=gate is not None,
            LSE=with_lse,
            SUMMARIES=summaries,
            PRECISION=float32_products(query) if query.dtype == torch.float32 else "tf32",
            TMA=descriptors is not None,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
    return output, lse


def _mean_rows(packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of keys and values in their own dtype, contiguous: what tensor cores multiply."""
    dtype = packed.tensors.query.dtype
    return packed.means.key.to(dtype).contiguous(), packed.means.value.to(dtype).contiguous()


@kept
def log_sizes(blocks: BlockPartition) -> torch.Tensor:
    """float32 [blocks]: logarithms of the blocks' sizes, to base 2."""
    return blocks.block_sizes.float().log2()


def _descriptors(key_rows: torch.Tensor, value_rows: torch.Tensor, block_n: int) -> tuple[Any, Any] | None:
    """Tensor-memory descriptors of the packed keys and values; None where the GPU, or the shape, has none."""
    packed = (key_rows, value_rows)
    if packed[0].device.type != "cuda" or not _has_tensor_memory(packed[0].device) or not key_rows.numel():
        return None
    sizes = {rows.shape[-1] for rows in packed}
    if any(size != triton.next_power_of_2(size) or size < 16 for size in sizes):
        return None
    if packed[0].shape[:3].numel() > INT32_MAX:
        return None
    key, value = (
        TensorDescriptor.from_tensor(rows.view(-1, rows.shape[-1]), [block_n, rows.shape[-1]])
        for rows in packed
    )
    return key, value


@lru_cache(maxsize=16)
def _has_tensor_memory(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _tile(query: torch.Tensor, value_size: int, capacity: int) -> Tile:
    room = shared_memory(query.device)
    fitting = next((t for t in _TILES if t.shared_bytes(query, value_size) <= room), _TILES[-1])
    rows = min(fitting.block_m, max(16, triton.next_power_of_2(capacity)))
    return fitting._replace(block_m=rows)
