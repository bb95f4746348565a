"""Lists of groups of GROUP packed rows, made on the device: which keys a query block needs, which queries a key block.

An entry is `group * 32 + valid rows`. Lists are read whole steps at a time, and one step ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.kept import kept
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.triton_pack import GROUP, first_rows
from omni_attn.ops.layout import int32_on


class KeyGroups(NamedTuple):
    """Groups of packed key rows for each query block.

    Attributes:
        entries: int32 [B, H, query blocks, length], whole groups first; entries of no row fill up the last step.
        steps: int32 [B, H, query blocks, 2], steps of whole groups alone, and all of them.
    """

    entries: torch.Tensor
    steps: torch.Tensor


class QueryGroups(NamedTuple):
    """Groups of packed query rows for each key block of each query head.

    Attributes:
        entries: int32, `group * 32 + valid rows`; those of one key block ascend, and entries of no row fill it up to
            whole steps.
        starts: int64 [B * H * key blocks + 1], where the list of each key block starts.
        lengths: int64 [B * H * key blocks], entries of each list.
    """

    entries: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


@triton.jit
def list_key_groups_kernel(  # type: ignore[no-untyped-def]
    indices_ptr,
    counts_ptr,
    sizes_ptr,
    first_rows_ptr,
    entries_ptr,
    steps_ptr,
    cap,
    length,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
):
    """The list of one query block from its row of indices [B * H * query blocks, cap]."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, WIDTH)
    there = offs < tl.load(counts_ptr + row)
    block = tl.load(indices_ptr + row * cap + offs, mask=there, other=0)
    size = tl.load(sizes_ptr + block, mask=there, other=0)
    group = tl.load(first_rows_ptr + block, mask=there, other=0) // GROUP
    whole, rest = size // GROUP, size % GROUP
    partial = (rest > 0).to(tl.int32)
    wholes = tl.sum(whole, 0)
    entries_ptr += row * length
    places = tl.cumsum(whole, 0) - whole
    for g in range(GROUPS):
        tl.store(entries_ptr + places + g, (group + g) * 32 + GROUP, mask=g < whole)
    places = wholes + tl.cumsum(partial, 0) - partial
    tl.store(entries_ptr + places, (group + whole) * 32 + rest, mask=rest > 0)
    used = wholes + tl.sum(partial, 0)
    steps = (used + STEP - 1) // STEP
    fill = used + tl.arange(0, STEP)
    tl.store(entries_ptr + fill, fill * 0, mask=fill < steps * STEP)
    tl.store(steps_ptr + row * 2, wholes // STEP)
    tl.store(steps_ptr + row * 2 + 1, steps)


@triton.jit
def list_query_groups_kernel(  # type: ignore[no-untyped-def]
    listed_ptr,
    sizes_ptr,
    first_rows_ptr,
    starts_ptr,
    lengths_ptr,
    entries_ptr,
    nq,
    nk,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    WRITE: tl.constexpr,
):
    """The list of one key block from its row of listed [B * H, nk + 1, nq]; without WRITE its length alone."""
    row = tl.program_id(0).to(tl.int64)
    listed_ptr += (row + row // nk) * nq
    if WRITE:
        entries_ptr += tl.load(starts_ptr + row)
    used = 0
    filler = 0x3FFFFFF
    for start in range(0, nq, WIDTH):
        offs = start + tl.arange(0, WIDTH)
        there = tl.load(listed_ptr + offs, mask=offs < nq, other=0) != 0
        size = tl.load(sizes_ptr + offs, mask=there, other=0)
        groups = (size + GROUP - 1) // GROUP
        if WRITE:
            group = tl.load(first_rows_ptr + offs, mask=there, other=0) // GROUP
            places = used + tl.cumsum(groups, 0) - groups
            for g in range(GROUPS):
                entry = (group + g) * 32 + tl.minimum(size - g * GROUP, GROUP)
                tl.store(entries_ptr + places + g, entry, mask=g < groups)
            filler = tl.minimum(filler, tl.min(tl.where(there, group, 0x3FFFFFF), 0))
        used += tl.sum(groups, 0)
    steps = (used + STEP - 1) // STEP
    if WRITE:
        # Without a valid row, and of rows that are on the list anyway: what they hold can reach nobody else.
        fill = used + tl.arange(0, STEP)
        tl.store(entries_ptr + fill, filler * 32 + fill * 0, mask=fill < steps * STEP)
    else:
        tl.store(lengths_ptr + row, steps * STEP)


def list_key_groups(selected: SelectedBlocks, key_blocks: BlockPartition, block_n: int) -> KeyGroups:
    """The selection in groups of rows, each list in whole steps of `block_n` rows."""
    cap, step = selected.indices.shape[-1], block_n // GROUP
    # The largest blocks bound any choice of cap blocks.
    longest = sum(sorted((-(-size // GROUP) for size in key_blocks.sizes), reverse=True)[:cap])
    length = (-(-longest // step) + 1) * step  # one more step, which is read ahead and never used
    indices, counts = selected.indices.contiguous(), selected.counts.contiguous()
    entries = torch.empty(*counts.shape, length, dtype=torch.int32, device=indices.device)
    steps = torch.empty(*counts.shape, 2, dtype=torch.int32, device=indices.device)
    width = triton.next_power_of_2(cap)
    list_key_groups_kernel[(counts.numel(),)](
        indices,
        counts,
        key_blocks.block_sizes,
        first_rows(key_blocks)[0],
        entries,
        steps,
        cap,
        length,
        WIDTH=width,
        GROUPS=key_blocks.capacity // GROUP,
        GROUP=GROUP,
        STEP=step,
        num_warps=4 if width >= 1024 else 1,
    )
    return KeyGroups(entries, steps)


def list_query_groups(
    selected: SelectedBlocks, query_blocks: BlockPartition, key_blocks: int, block_m: int
) -> QueryGroups:
    """The inverse of the selection, each list in whole steps of `block_m` rows."""
    batch, heads, nq, cap = selected.indices.shape
    device = selected.indices.device
    chosen = torch.arange(cap, device=device) < selected.counts[..., None]
    # One more row takes what is not chosen.
    blocks = selected.indices.where(chosen, key_blocks).long().mT
    listed = torch.zeros(batch, heads, key_blocks + 1, nq, dtype=torch.uint8, device=device)
    listed.scatter_(2, blocks, 1)

    lists, step = batch * heads * key_blocks, block_m // GROUP
    groups = sum(-(-size // GROUP) for size in query_blocks.sizes)
    # Each query block is on at most cap lists; each list is filled up; and one step is read ahead and never used.
    most = batch * heads * min(cap, key_blocks) * groups + lists * (step - 1) + step
    entries = torch.empty(most, dtype=torch.int32, device=device)
    starts = torch.zeros(lists + 1, dtype=torch.int64, device=device)
    lengths = torch.empty(lists, dtype=torch.int64, device=device)
    for write in (False, True):
        list_query_groups_kernel[(lists,)](
            listed,
            query_blocks.block_sizes,
            first_rows(query_blocks)[0],
            starts,
            lengths,
            entries,
            nq,
            key_blocks,
            WIDTH=min(1024, max(16, triton.next_power_of_2(nq))),
            GROUPS=-(-query_blocks.capacity // GROUP),
            GROUP=GROUP,
            STEP=step,
            WRITE=write,
            num_warps=4,
        )
        if not write:
            torch.cumsum(lengths, 0, out=starts[1:])
    return QueryGroups(entries, starts, lengths)


@kept
def row_tiles(blocks: BlockPartition, rows: int) -> torch.Tensor:
    """Blocks cut into tiles of at most `rows` rows.

    Returns:
        int32 [tiles, 4]: block, first place in block order, first packed row, rows.
    """
    tiles: list[int] = []
    place = packed = 0
    for block, size in enumerate(blocks.sizes):
        for first in range(0, size, rows):
            tiles += (block, place + first, packed + first, min(rows, size - first))
        place, packed = place + size, packed + -(-size // GROUP) * GROUP
    return int32_on(blocks.device, tiles).view(-1, 4)
