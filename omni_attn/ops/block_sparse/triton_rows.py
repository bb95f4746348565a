"""Triton kernels around other people's: lists of the pieces of selected blocks, and rows back into sequence order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_attn.ops.block_sparse.executor import CoarseTerm, SelectedBlocks
from omni_attn.ops.block_sparse.pieces import Pieces
from omni_attn.ops.layout import on_device, unit_stride


@triton.jit
def _list_kernel(  # type: ignore[no-untyped-def]
    indices_ptr,
    counts_ptr,
    firsts_ptr,
    numbers_ptr,
    shift_ptr,
    lists_ptr,
    totals_ptr,
    cap,
    width,
    num_blocks,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    SHIFT: tl.constexpr,
    WRITE: tl.constexpr,
):
    """One list: of its selected blocks SLOTS at a time, of each numbers[block] pieces from firsts[block] on."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + row)
    offs = tl.arange(0, SLOTS)
    piece = tl.arange(0, MOST)[None, :]
    shift = 0
    if SHIFT:
        shift = tl.load(shift_ptr + row // num_blocks)
    total = 0
    for slot in range(0, count, SLOTS):
        there = slot + offs < count
        block = tl.load(indices_ptr + row * cap + slot + offs, mask=there, other=0)
        number = tl.load(numbers_ptr + block, mask=there, other=0)
        if WRITE:
            first = tl.load(firsts_ptr + block, mask=there, other=0) + shift
            start = total + tl.cumsum(number, 0) - number
            places = lists_ptr + row * width + start[:, None] + piece
            tl.store(places, first[:, None] + piece, mask=piece < number[:, None])
        total += tl.sum(number, 0)
    tl.store(totals_ptr + row, total)
    if WRITE:  # some kernels look at the first entry whatever the count is
        tl.store(lists_ptr + row * width, shift, mask=total == 0)


@triton.jit
def _unpack_kernel(  # type: ignore[no-untyped-def]
    rows_ptr,
    out_ptr,
    coarse_ptr,
    gate_ptr,
    order_ptr,
    offsets_ptr,
    first_rows_ptr,
    stride_rb,
    stride_rh,
    stride_rr,
    stride_gb,
    stride_gs,
    stride_gh,
    tokens,
    heads,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    COARSE: tl.constexpr,
    GATE: tl.constexpr,
):
    # All heads of a block run side by side: together they write whole tokens, which lie dense in memory.
    block, head, batch = tl.program_id(0) // heads, tl.program_id(0) % heads, tl.program_id(1)
    blocks = tl.num_programs(0) // heads
    start = tl.load(offsets_ptr + block)
    size = tl.load(offsets_ptr + block + 1) - start
    first_row = tl.load(first_rows_ptr + block)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    rows_ptr += batch.to(tl.int64) * stride_rb + head.to(tl.int64) * stride_rh
    gate_ptr += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
    out_ptr += batch.to(tl.int64) * tokens * heads * D + head * D
    if COARSE:
        coarse_ptr += ((batch * heads + head).to(tl.int64) * blocks + block) * D
        coarse = tl.load(coarse_ptr + offs_d, mask=in_d, other=0.0).to(tl.float32)[None, :]
    for r in range(0, size, BLOCK_R):
        rows = r + tl.arange(0, BLOCK_R)
        inside = (rows < size)[:, None] & in_d[None, :]
        token = tl.load(order_ptr + start + rows, mask=rows < size, other=0).to(tl.int64)[:, None]
        at = (first_row + rows).to(tl.int64)[:, None] * stride_rr + offs_d[None, :]
        out = tl.load(rows_ptr + at, mask=inside, other=0.0)
        if COARSE:
            added = coarse
            if GATE:
                gate = tl.load(gate_ptr + token * stride_gs + offs_d[None, :], mask=inside, other=0.0)
                added = coarse * gate.to(tl.float32)
            out = (out.to(tl.float32) + added).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * heads * D + offs_d[None, :], out, mask=inside)


def list_runs(
    selected: SelectedBlocks,
    firsts: torch.Tensor,
    numbers: torch.Tensor,
    most: int,
    width: int,
    shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists [B, H, query blocks, width] of runs of pieces, and their lengths [B, H, query blocks]; see pieces.

    Args:
        firsts, numbers: int32 [blocks]; no number is above `most`.
        shift: int32 [B, H], added to the entries.
    """
    counts = selected.counts.contiguous()
    lists = torch.empty(*counts.shape, width, dtype=torch.int32, device=counts.device)
    return lists, _run_list_kernel(selected, firsts, numbers, most, shift, lists)


def sum_selected(selected: SelectedBlocks, numbers: torch.Tensor) -> torch.Tensor:
    """int32 [B, H, query blocks]: the sum of int32 numbers [blocks] over the selected ones."""
    return _run_list_kernel(selected, numbers, numbers, 1, None, None)


def _run_list_kernel(
    selected: SelectedBlocks,
    firsts: torch.Tensor,
    numbers: torch.Tensor,
    most: int,
    shift: torch.Tensor | None,
    lists: torch.Tensor | None,
) -> torch.Tensor:
    indices, counts = selected.indices.contiguous(), selected.counts.contiguous()
    cap, totals = indices.shape[-1], torch.empty_like(counts)
    most = triton.next_power_of_2(most)
    slots = min(triton.next_power_of_2(cap), max(1, 1024 // most))
    with on_device(counts):
        _list_kernel[(counts.numel(),)](
            indices,
            counts,
            firsts.contiguous(),
            numbers.contiguous(),
            counts if shift is None else shift,
            totals if lists is None else lists,
            totals,
            cap,
            0 if lists is None else lists.shape[-1],
            counts.shape[-1],
            SLOTS=slots,
            MOST=most,
            SHIFT=shift is not None,
            WRITE=lists is not None,
            num_warps=1 if slots * most <= 256 else 4,
        )
    return totals


def unpack_rows(rows: torch.Tensor, pieces: Pieces, coarse: CoarseTerm | None) -> torch.Tensor:
    """Rows [B, H, pieces * unit, D] of any strides -> [B, S, H, D] in sequence order; the coarse term is added."""
    rows, blocks = unit_stride(rows), pieces.blocks
    batch, heads, _, size = rows.shape
    output = rows.new_empty(batch, blocks.tokens, heads, size)
    gate = None if coarse is None or coarse.gate is None else unit_stride(coarse.gate)
    with on_device(rows):
        _unpack_kernel[(blocks.num_blocks * heads, batch)](
            rows,
            output,
            rows if coarse is None else coarse.output.contiguous(),
            rows if gate is None else gate,
            blocks.order,
            blocks.offsets,
            pieces.first_rows,
            *rows.stride()[:3],
            *(rows if gate is None else gate).stride()[:3],
            blocks.tokens,
            heads,
            D=size,
            BLOCK_D=triton.next_power_of_2(size),
            BLOCK_R=min(64, triton.next_power_of_2(blocks.capacity)),
            COARSE=coarse is not None,
            GATE=gate is not None,
            num_warps=4,
        )
    return output
