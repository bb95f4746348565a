"""Block-sparse attention in Triton: any block size, half or single precision, grouped heads, on every GPU with Triton.

pack      one pass over query (means alone), key and value (means, and rows brought together)
attend    lists of the selected rows, then one kernel that reads queries, and writes outputs, in sequence order
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from omni_attn.ops.block_sparse.executor import CoarseTerm, Executor, Packed, SelectedBlocks, add_coarse
from omni_attn.ops.block_sparse.gradients import attend_with_gradients, means_with_gradient, needs_gradients
from omni_attn.ops.block_sparse.means import BlockMeans
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.triton_attend import attend_kernel
from omni_attn.ops.block_sparse.triton_backward import attend_backward
from omni_attn.ops.block_sparse.triton_groups import row_tiles
from omni_attn.ops.block_sparse.triton_lists import list_rows
from omni_attn.ops.block_sparse.triton_pack import GROUP, pack_rows
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


class _Tensors(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_rows: torch.Tensor
    value_rows: torch.Tensor


class TritonExecutor(Executor):
    """Our kernels."""

    name: ClassVar[str] = "triton"
    differentiable: ClassVar[bool] = True

    def pack(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> Packed:
        """See Executor.pack."""
        query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
        _, query_means = pack_rows(query, query_blocks, write=False)
        key_rows, key_means = pack_rows(key, key_blocks)
        value_rows, value_means = pack_rows(value, key_blocks)
        assert query_means is not None and key_means is not None and value_means is not None
        assert key_rows is not None and value_rows is not None
        if needs_gradients(query, key, value):
            query_means = means_with_gradient(query, query_means, query_blocks)
            key_means = means_with_gradient(key, key_means, key_blocks)
            value_means = means_with_gradient(value, value_means, key_blocks)
        means = BlockMeans(query_means, key_means, value_means)
        return Packed(means, query_blocks, key_blocks, _Tensors(query, key, value, key_rows, value_rows))

    def attend(
        self,
        packed: Packed,
        selected: SelectedBlocks,
        softmax_scale: float,
        coarse: CoarseTerm | None = None,
    ) -> torch.Tensor:
        """See Executor.attend; scores and sums are float32.

        With gradients, the fine output is rounded before the coarse term is added: the backward reads it.
        """
        query, key, value = packed.tensors[:3]
        if not needs_gradients(query, key, value, *(coarse or ())):
            return attend(packed, selected, softmax_scale, coarse)[0]
        fine = attend_with_gradients(
            lambda: attend(packed, selected, softmax_scale, with_lse=True),
            attend_backward,
            query,
            key,
            value,
            selected,
            packed.query_blocks,
            packed.key_blocks,
            softmax_scale,
        )
        return add_coarse(fine, coarse, packed.query_blocks)


def attend(
    packed: Packed,
    selected: SelectedBlocks,
    softmax_scale: float,
    coarse: CoarseTerm | None = None,
    *,
    with_lse: bool = False,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output [B, Sq, H, Dv] in sequence order, and, where asked, the log-sum-exp [B, H, Sq] (natural log)."""
    query, _, _, key_rows, value_rows = packed.tensors
    query_blocks, key_blocks = packed.query_blocks, packed.key_blocks
    batch, tokens, heads, size = query.shape
    groups, value_size = value_rows.shape[1], value_rows.shape[-1]
    tile = tile or _tile(query, value_size, query_blocks.capacity)
    output = query.new_empty(batch, tokens, heads, value_size)
    lse = query.new_empty(batch, heads, tokens, dtype=torch.float32) if with_lse else None
    lists = list_rows(selected, key_blocks, tile.block_n)
    tiles = row_tiles(query_blocks, tile.block_m)
    gate = None if coarse is None or coarse.gate is None else unit_stride(coarse.gate)
    descriptors = _descriptors(key_rows, value_rows, tile.block_n)
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
            *lists,
            query_blocks.order,
            tiles,
            *query.stride()[:3],
            *output.stride()[:3],
            *(output if gate is None else gate).stride()[:3],
            key_rows.shape[2],
            query_blocks.num_blocks,
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
            PRECISION=float32_products(query) if query.dtype == torch.float32 else "tf32",
            TMA=descriptors is not None,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
    return output, lse


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
