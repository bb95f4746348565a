"""The Triton kernel of attention over pages, for prefill and decode.

A program takes BLOCK_M rows of one request and kv head: a row is one query head of one token, so that a decode step
with grouped heads fills its rows. It walks over one split of the keys in blocks of BLOCK_N tokens: those that all rows
see first, without masks, then the rest at both ends. A block's rows are found through the block table, whose entries
are read one step ahead; where pages hold whole blocks, a tensor memory accelerator fetches them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(x, dtype: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of the cache in query's dtype. BITS: float8_e4m3fn as its bits, which older GPUs have no dtype for."""
    if BITS:
        wide = x.to(tl.uint16)
        # Sign, exponent and digits at their places in float16, whose exponents are larger by 8: 2 ** -8 of the number.
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        half |= (((wide & 0x7F) + 1) & 0x80) << 7  # NaN has all bits set, and no other number
        return half.to(tl.float16, bitcast=True).to(dtype)
    else:  # noqa: RET505
        return x.to(dtype)


@triton.jit
def _attend_rows(  # type: ignore[no-untyped-def]
    acc, total, peak, q, k, v, scale, valid, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """Online softmax over the rows of k and v [N, D]; `scale`, above 0, brings scores to base 2; valid [M, N]."""
    scores = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(valid, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    shift = new_peak
    if MASKED:  # a row may have seen no key yet
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    # The scale falls into the same instruction as the difference.
    p = tl.exp2(scores * scale - shift[:, None])
    fade = tl.exp2(peak - shift)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit
def request_of(  # type: ignore[no-untyped-def]
    tile, starts_ptr, num_reqs, RATIO: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The request of a tile: the last one whose first tile, start * RATIO // BLOCK_M + request, is not behind it."""
    low = 0
    high = num_reqs
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) * RATIO // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def attend_pages_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    cache_ptr,
    desc,
    out_ptr,
    lse_ptr,
    starts_ptr,
    lens_ptr,
    table_ptr,
    causal_ptr,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_os,
    stride_page,
    stride_kv,
    stride_place,
    stride_head,
    stride_table,
    page_rows,
    kv_rows,
    head_rows,
    head_columns,
    tokens,
    num_reqs,
    tiles_each,
    splits,
    scale,
    value_scale,
    CAUSAL: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    RATIO: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile. CAUSAL: 0 no, 1 all requests, 2 those that causal_ptr names; LEFT, RIGHT: window, -1 = unlimited.

    EVEN: every request has `tiles_each` tiles; else see request_of. SPLIT: outputs and LSE of splits, to be merged.
    """
    group = tl.program_id(1)
    split = tl.program_id(2)
    tile = tl.program_id(0)
    if EVEN:
        request = tile // tiles_each
        tile = tile % tiles_each
    else:
        request = request_of(tile, starts_ptr, num_reqs, RATIO, BLOCK_M)
        tile -= tl.load(starts_ptr + request) * RATIO // BLOCK_M + request
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    if tile * BLOCK_M >= count * RATIO:
        return
    length = tl.load(lens_ptr + request)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    row = tile * BLOCK_M + offs_m
    in_m = row < count * RATIO
    token = row // RATIO
    head = group * RATIO + row % RATIO
    rows = (start + token).to(tl.int64)
    q_at = q_ptr + (rows * stride_qt + head.to(tl.int64) * stride_qh)[:, None] + offs_d[None, :]
    q = tl.load(q_at, mask=in_m[:, None] & in_d[None, :], other=0.0)

    # Keys in sight of the tile, and of each of its rows.
    first = length - count + tile * BLOCK_M // RATIO
    last = length - count + (tl.minimum(tile * BLOCK_M + BLOCK_M, count * RATIO) - 1) // RATIO
    position = length - count + token
    right = 1 << 30
    if RIGHT >= 0:
        right = RIGHT
    if CAUSAL == 1:
        right = 0
    if CAUSAL == 2:
        right = tl.where(tl.load(causal_ptr + request) != 0, 0, right)
    begin = 0
    seen_from = 0
    if LEFT >= 0:
        begin = tl.maximum(0, first - LEFT) // BLOCK_N
        seen_from = tl.maximum(0, last - LEFT)
    end = length
    seen_to = length
    if CAUSAL > 0 or RIGHT >= 0:
        end = tl.maximum(0, tl.minimum(length, last + 1 + right))
        seen_to = tl.maximum(0, tl.minimum(length, first + 1 + right))
    end = tl.cdiv(end, BLOCK_N)
    if SPLIT:
        share = tl.cdiv(tl.maximum(0, end - begin), splits)
        begin += split * share
        end = tl.minimum(end, begin + share)
    # Blocks [begin, end); those of [whole, ragged) are seen by every row.
    end = tl.maximum(begin, end)
    whole = tl.minimum(end, tl.maximum(begin, tl.cdiv(seen_from, BLOCK_N)))
    ragged = tl.minimum(end, tl.maximum(whole, seen_to // BLOCK_N))

    table_ptr += request.to(tl.int64) * stride_table
    cache_ptr += group.to(tl.int64) * stride_head
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)

    if TMA:  # a block lies within a page
        page = tl.load(table_ptr + whole * BLOCK_N // P, mask=whole < ragged, other=0)
        for block in tl.range(whole, ragged, num_stages=STAGES):
            behind = (block + 1) * BLOCK_N
            ahead = tl.load(table_ptr + behind // P, mask=block + 1 < ragged, other=0)
            at = page * page_rows + group * head_rows + block * BLOCK_N % P
            k = desc.load([at, group * head_columns])
            v = desc.load([at + kv_rows, group * head_columns])
            acc, total, peak = _attend_rows(acc, total, peak, q, k, v, scale, None, False, PRECISION)
            page = ahead
    else:
        keys = whole * BLOCK_N + offs_n
        page = tl.load(table_ptr + keys // P, mask=keys < ragged * BLOCK_N, other=0)
        for block in tl.range(whole, ragged, num_stages=STAGES):
            keys = block * BLOCK_N + offs_n
            behind = keys + BLOCK_N
            ahead = tl.load(table_ptr + behind // P, mask=behind < ragged * BLOCK_N, other=0)
            place = page.to(tl.int64) * stride_page + (keys % P).to(tl.int64) * stride_place
            at = cache_ptr + place[:, None] + offs_d[None, :]
            if D == BLOCK_D:
                k = tl.load(at)
                v = tl.load(at + stride_kv)
            else:
                k = tl.load(at, mask=in_d[None, :], other=0)
                v = tl.load(at + stride_kv, mask=in_d[None, :], other=0)
            k = widened(k, q.dtype, BITS)
            v = widened(v, q.dtype, BITS)
            acc, total, peak = _attend_rows(acc, total, peak, q, k, v, scale, None, False, PRECISION)
            page = ahead

    for step in tl.range(0, whole - begin + end - ragged, num_stages=2):
        block = tl.where(step < whole - begin, begin + step, ragged + step - (whole - begin))
        keys = block * BLOCK_N + offs_n
        inside = keys < length
        pages = tl.load(table_ptr + keys // P, mask=inside, other=0)
        places = pages.to(tl.int64) * stride_page + (keys % P).to(tl.int64) * stride_place
        rows_at = cache_ptr + places[:, None] + offs_d[None, :]
        # What lies behind the last token may be NaN, which a weight of zero does not silence.
        there = inside[:, None] & in_d[None, :]
        k = widened(tl.load(rows_at, mask=there, other=0), q.dtype, BITS)
        v = widened(tl.load(rows_at + stride_kv, mask=there, other=0), q.dtype, BITS)
        valid = inside[None, :]
        if CAUSAL > 0 or RIGHT >= 0:
            valid = valid & (keys[None, :] <= (position + right)[:, None])
        if LEFT >= 0:
            valid = valid & (keys[None, :] >= (position - LEFT)[:, None])
        acc, total, peak = _attend_rows(acc, total, peak, q, k, v, scale, valid, True, PRECISION)

    # A row without a key has no weight at all: zeros.
    out = acc * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    out_ptr += split.to(tl.int64) * stride_os
    out_at = out_ptr + (rows * stride_ot + head.to(tl.int64) * stride_oh)[:, None] + offs_d[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_d[None, :])
    if SPLIT:  # to base 2, [S, T, H]
        heads = tl.num_programs(1) * RATIO
        lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(total))
        tl.store(lse_ptr + (split.to(tl.int64) * tokens + rows) * heads + head, lse, mask=in_m)


@triton.jit
def merge_splits_kernel(  # type: ignore[no-untyped-def]
    part_ptr,
    lse_ptr,
    out_ptr,
    stride_ot,
    stride_oh,
    rows,
    heads,
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Outputs [S, T, H, D] of splits, weighted by their LSE [S, T, H] to base 2, into [T, H, D]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    inside = row < rows
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    at = row
    for _ in range(splits):
        lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
        filled = (lse > float("-inf"))[:, None] & in_d[None, :]
        part = tl.load(part_ptr + at[:, None] * D + offs_d[None, :], mask=filled, other=0.0)
        new_peak = tl.maximum(peak, lse)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        fade = tl.exp2(peak - shift)
        weight = tl.exp2(lse - shift)
        acc = acc * fade[:, None] + part * weight[:, None]
        total = total * fade + weight
        peak = new_peak
        at += rows
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out_ptr + (row // heads * stride_ot + row % heads * stride_oh)[:, None] + offs_d[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_d[None, :])
