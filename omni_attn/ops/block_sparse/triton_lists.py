"""Lists of the packed rows that each query block attends to, made on the device: what triton_attend walks over."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.kept import kept
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.triton_pack import GROUP, first_rows
from omni_attn.ops.layout import on_device


class RowLists(NamedTuple):
    """int32: lists [B, H, query blocks, length], and steps [B, H, query blocks, 2].

    Attributes:
        chosen: uint8 [B, H, query blocks, key blocks], 1 where a key block is selected; None unless asked for.
    """

    chunks: torch.Tensor
    groups: torch.Tensor
    steps: torch.Tensor
    chosen: torch.Tensor | None


@triton.jit
def list_rows_kernel(  # type: ignore[no-untyped-def]
    indices_ptr,
    counts_ptr,
    sizes_ptr,
    first_rows_ptr,
    chunks_ptr,
    groups_ptr,
    steps_ptr,
    chosen_ptr,
    cap,
    chunks_length,
    groups_length,
    key_blocks,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """The lists of one query tile: chunks are first rows of BLOCK_N that lie behind one another, which one descriptor
    can fetch; groups are what is left, encoded as in triton_groups (a first row is GROUP, 16, times its group); and
    steps [2] counts the steps over each. With CHOSEN, selected blocks are marked in a row of zeros."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, WIDTH)
    count = tl.load(counts_ptr + row)
    there = offs < count
    block = tl.load(indices_ptr + row * cap + offs, mask=there, other=0)
    size = tl.load(sizes_ptr + block, mask=there, other=0)
    first = tl.load(first_rows_ptr + block, mask=there, other=0)

    chunks = size // BLOCK_N
    chunk_at = chunks_ptr + row * chunks_length + tl.cumsum(chunks, 0) - chunks
    for c in range(CHUNKS):
        tl.store(chunk_at + c, first + c * BLOCK_N, mask=c < chunks)

    left = size - chunks * BLOCK_N
    groups = (left + GROUP - 1) // GROUP
    group_at = groups_ptr + row * groups_length + tl.cumsum(groups, 0) - groups
    first += chunks * BLOCK_N
    for g in range(BLOCK_N // GROUP):
        valid = tl.minimum(left - g * GROUP, GROUP)
        tl.store(group_at + g, (first + g * GROUP) * 2 + valid, mask=g < groups)
    # Groups without a valid row fill the last step.
    used = tl.sum(groups, 0)
    per_step = BLOCK_N // GROUP
    steps = (used + per_step - 1) // per_step
    fill = used + tl.arange(0, BLOCK_N // GROUP)
    tl.store(groups_ptr + row * groups_length + fill, fill * 0, mask=fill < steps * per_step)
    tl.store(steps_ptr + row * 2, tl.sum(chunks, 0))
    tl.store(steps_ptr + row * 2 + 1, steps)
    if CHOSEN:
        tl.store(chosen_ptr + row * key_blocks + block, there.to(tl.uint8), mask=there)


def list_rows(
    selected: SelectedBlocks, key_blocks: BlockPartition, block_n: int, *, with_chosen: bool = False
) -> RowLists:
    """The packed rows of the selected blocks, in chunks of block_n and groups of GROUP; see triton_attend."""
    cap = selected.indices.shape[-1]
    indices, counts = selected.indices.contiguous(), selected.counts.contiguous()
    chunks_length, groups_length = _list_lengths(key_blocks, cap, block_n)
    chunks, groups, steps = (
        torch.empty(*counts.shape, length, dtype=torch.int32, device=indices.device)
        for length in (chunks_length, groups_length, 2)
    )
    shape = (*counts.shape, key_blocks.num_blocks)
    chosen = torch.zeros(shape, dtype=torch.uint8, device=indices.device) if with_chosen else None
    width = triton.next_power_of_2(cap)
    with on_device(indices):
        list_rows_kernel[(counts.numel(),)](
            indices,
            counts,
            key_blocks.block_sizes,
            first_rows(key_blocks)[0],
            chunks,
            groups,
            steps,
            counts if chosen is None else chosen,
            cap,
            chunks_length,
            groups_length,
            key_blocks.num_blocks,
            WIDTH=width,
            CHUNKS=key_blocks.capacity // block_n,
            GROUP=GROUP,
            BLOCK_N=block_n,
            CHOSEN=with_chosen,
            num_warps=4 if width >= 1024 else 1,
        )
    return RowLists(chunks, groups, steps, chosen)


@kept
def _list_lengths(blocks: BlockPartition, cap: int, block_n: int) -> tuple[int, int]:
    """Bounds for any choice of cap blocks, with the step that is read ahead and never used."""
    chunks = sorted((size // block_n for size in blocks.sizes), reverse=True)
    groups = sorted((-(-(size % block_n) // GROUP) for size in blocks.sizes), reverse=True)
    per_step = block_n // GROUP
    return sum(chunks[:cap]) + 1, (-(-sum(groups[:cap]) // per_step) + 1) * per_step
