"""Triton kernels that bring blocks of a sequence together, and take their means in the same pass.

Packed rows: the blocks lie one behind the other, each padded with zero rows to a multiple of GROUP, [B, H, rows, D].
"""

from __future__ import annotations

from itertools import accumulate

import torch
import triton
import triton.language as tl

from omni_attn.ops.block_sparse.kept import kept
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.layout import int32_on, on_device, unit_stride

#: Packed rows of a block are a multiple of this: the smallest part of a block that a list of keys can name.
GROUP = 16


@triton.jit
def _pack_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    packed_ptr,
    means_ptr,
    order_ptr,
    offsets_ptr,
    first_rows_ptr,
    stride_xb,
    stride_xs,
    stride_xh,
    num_rows,
    heads,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WRITE: tl.constexpr,
    MEANS: tl.constexpr,
):
    # All heads of a block run side by side: together they read whole tokens, which lie dense in memory.
    block, head, batch = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    blocks = tl.num_programs(0) // heads
    start = tl.load(offsets_ptr + block)
    size = tl.load(offsets_ptr + block + 1) - start
    first_row = tl.load(first_rows_ptr + block)
    padded = tl.load(first_rows_ptr + block + 1) - first_row
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    x_ptr += batch.to(tl.int64) * stride_xb + head.to(tl.int64) * stride_xh
    head_of = (batch * heads + head).to(tl.int64)
    packed_ptr += head_of * num_rows * D
    total = tl.zeros([BLOCK_D], tl.float32)
    for r in range(0, padded, BLOCK_R):
        rows = r + tl.arange(0, BLOCK_R)
        tokens = tl.load(order_ptr + start + rows, mask=rows < size, other=0).to(tl.int64)
        inside = (rows < size)[:, None] & in_d[None, :]
        x = tl.load(x_ptr + tokens[:, None] * stride_xs + offs_d[None, :], mask=inside, other=0.0)
        if MEANS:
            total += tl.sum(x.to(tl.float32), 0)
        if WRITE:
            places = (first_row + rows).to(tl.int64)
            kept = (rows < padded)[:, None] & in_d[None, :]
            tl.store(packed_ptr + places[:, None] * D + offs_d[None, :], x, mask=kept)
    if MEANS:
        means_ptr += (head_of * blocks + block) * D
        tl.store(means_ptr + offs_d, total / size, mask=in_d)


def padded_sizes(blocks: BlockPartition) -> list[int]:
    """Packed rows of each block."""
    return [-(-size // GROUP) * GROUP for size in blocks.sizes]


@kept
def first_rows(blocks: BlockPartition) -> tuple[torch.Tensor, int]:
    """int32 [blocks + 1], the first packed row of each block, and the number of all rows."""
    firsts = list(accumulate(padded_sizes(blocks), initial=0))
    return int32_on(blocks.device, firsts), firsts[-1]


def pack_rows(
    tensor: torch.Tensor,
    blocks: BlockPartition,
    *,
    write: bool = True,
    means: bool = True,
    layout: tuple[torch.Tensor, int] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """[B, S, H, D] -> packed rows [B, H, rows, D] and float32 block means [B, H, blocks, D].

    Args:
        layout: other rows than first_rows gives, in its form; those behind a block's tokens become zeros.
    """
    tensor = unit_stride(tensor)
    batch, _, heads, size = tensor.shape
    firsts, rows = layout or first_rows(blocks)
    packed = tensor.new_empty(batch, heads, rows, size) if write else None
    mean = (
        torch.empty(batch, heads, blocks.num_blocks, size, dtype=torch.float32, device=tensor.device)
        if means
        else None
    )
    block_d = triton.next_power_of_2(size)
    with on_device(tensor):
        _pack_kernel[(blocks.num_blocks * heads, batch)](
            tensor,
            tensor if packed is None else packed,
            tensor if mean is None else mean,
            blocks.order,
            blocks.offsets,
            firsts,
            tensor.stride(0),
            tensor.stride(1),
            tensor.stride(2),
            rows,
            heads,
            D=size,
            BLOCK_D=block_d,
            BLOCK_R=min(64, triton.next_power_of_2(blocks.capacity + GROUP - 1)),
            WRITE=write,
            MEANS=means,
            num_warps=2,  # against 4: a third less time on an H200
        )
    return packed, mean
