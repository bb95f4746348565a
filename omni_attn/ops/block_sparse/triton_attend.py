"""The Triton kernel of attention over selected key blocks.

A query tile of at most BLOCK_M rows walks over the packed rows of its key blocks in two lists (triton_lists). Chunks
are BLOCK_N rows of one block, and hold nearly everything; where a GPU has a tensor memory accelerator, it fetches them.
What is left of each block comes as groups of GROUP rows, gathered across the borders of blocks, BLOCK_N rows at a time:
clipped tiles cost no more than their rows.

With summaries, the blocks that are not selected follow as one key each: the means of all blocks pass by, BLOCK_N at a
time, those of selected blocks under a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend_rows(  # type: ignore[no-untyped-def]
    acc, total, peak, q, k, v, scale, bias, valid, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """Online softmax over the rows of k [D, N] and v [N, Dv]; `scale` brings scores to base 2, where bias [N] is."""
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if bias is not None:
        scores += bias[None, :]
    if MASKED:
        scores = tl.where(valid[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shift = new_peak
    if MASKED:  # a step may hold no valid row at all
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(peak - shift)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit
def _load(at, inside, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:
        return tl.load(at)
    else:  # noqa: RET505
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def attend_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    gate_ptr,
    coarse_ptr,
    mean_k_ptr,
    mean_v_ptr,
    log_sizes_ptr,
    chosen_ptr,
    chunks_ptr,
    groups_ptr,
    steps_ptr,
    order_ptr,
    tiles_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_ob,
    stride_os,
    stride_oh,
    stride_gb,
    stride_gs,
    stride_gh,
    key_rows,
    num_blocks,
    key_blocks,
    tokens,
    chunks_length,
    groups_length,
    scale,
    heads_per_group,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    COARSE: tl.constexpr,
    GATE: tl.constexpr,
    LSE: tl.constexpr,
    SUMMARIES: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One query tile of one head: tiles [items, 4] are triton_groups.row_tiles."""
    item, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    block = tl.load(tiles_ptr + item * 4)
    first = tl.load(tiles_ptr + item * 4 + 1)
    count = tl.load(tiles_ptr + item * 4 + 3)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_V)
    in_m = offs_m < count
    in_d = offs_d < D
    in_v = offs_v < DV
    tokens_m = tl.load(order_ptr + first + offs_m, mask=in_m, other=0).to(tl.int64)

    q_ptr += batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    q_at = q_ptr + tokens_m[:, None] * stride_qs + offs_d[None, :]
    q = tl.load(q_at, mask=in_m[:, None] & in_d[None, :], other=0.0)

    group_of = batch * (heads // heads_per_group) + head // heads_per_group
    k_at = k_ptr + group_of.to(tl.int64) * key_rows * D + offs_d[:, None]
    v_at = v_ptr + group_of.to(tl.int64) * key_rows * DV + offs_v[None, :]
    first_row = group_of * key_rows
    row = (batch * heads + head).to(tl.int64) * num_blocks + block
    chunk_steps = tl.load(steps_ptr + row * 2)
    group_steps = tl.load(steps_ptr + row * 2 + 1)
    chunks_ptr += row * chunks_length
    groups_ptr += row * groups_length

    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Lists are read one step ahead, so that an address is never waited for.
    chunk = tl.load(chunks_ptr)
    for step in tl.range(0, chunk_steps, num_stages=STAGES):
        ahead = tl.load(chunks_ptr + step + 1)
        if TMA:
            k = k_desc.load([first_row + chunk, 0]).T
            v = v_desc.load([first_row + chunk, 0])
        else:
            rows = chunk + offs_n
            k = _load(k_at + rows[None, :].to(tl.int64) * D, in_d[:, None], D == BLOCK_D)
            v = _load(v_at + rows[:, None].to(tl.int64) * DV, in_v[None, :], DV == BLOCK_V)
        acc, total, peak = _attend_rows(acc, total, peak, q, k, v, scale, None, None, False, PRECISION)
        chunk = ahead

    per_step: tl.constexpr = BLOCK_N // GROUP
    groups_at = groups_ptr + offs_n // GROUP
    group = tl.load(groups_at)
    # Few steps: one stage less leaves the shared memory to the loop above, and two tiles on one SM.
    for step in tl.range(0, group_steps, num_stages=2):
        ahead = tl.load(groups_at + (step + 1) * per_step)
        rows = (group >> 5) * GROUP + offs_n % GROUP
        k = _load(k_at + rows[None, :].to(tl.int64) * D, in_d[:, None], D == BLOCK_D)
        valid = offs_n % GROUP < (group & 31)
        # Groups that fill a step name rows that nobody selected: a weight of zero does not silence a NaN in them.
        v = tl.load(v_at + rows[:, None].to(tl.int64) * DV, mask=valid[:, None] & in_v[None, :], other=0.0)
        acc, total, peak = _attend_rows(acc, total, peak, q, k, v, scale, None, valid, True, PRECISION)
        group = ahead

    if SUMMARIES:
        k_at = mean_k_ptr + group_of.to(tl.int64) * key_blocks * D + offs_d[:, None]
        v_at = mean_v_ptr + group_of.to(tl.int64) * key_blocks * DV + offs_v[None, :]
        chosen_ptr += row * key_blocks
        chosen = tl.load(chosen_ptr + offs_n, mask=offs_n < key_blocks, other=1)
        for start in tl.range(0, key_blocks, BLOCK_N, num_stages=2):
            blocks = start + offs_n
            behind = blocks + BLOCK_N
            ahead = tl.load(chosen_ptr + behind, mask=behind < key_blocks, other=1)
            there = blocks < key_blocks
            bias = tl.load(log_sizes_ptr + blocks, mask=there, other=0.0)
            places = blocks.to(tl.int64)
            k = tl.load(k_at + places[None, :] * D, mask=there[None, :] & in_d[:, None], other=0.0)
            v = tl.load(v_at + places[:, None] * DV, mask=there[:, None] & in_v[None, :], other=0.0)
            acc, total, peak = _attend_rows(
                acc, total, peak, q, k, v, scale, bias, chosen == 0, True, PRECISION
            )
            chosen = ahead

    # A row without a key has no weight at all: zeros.
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    kept = in_m[:, None] & in_v[None, :]
    if COARSE:
        coarse = tl.load(coarse_ptr + row * DV + offs_v, mask=in_v, other=0.0)[None, :]
        if GATE:
            gate_ptr += batch.to(tl.int64) * stride_gb + head.to(tl.int64) * stride_gh
            gate = tl.load(gate_ptr + tokens_m[:, None] * stride_gs + offs_v[None, :], mask=kept, other=0.0)
            coarse = coarse * gate.to(tl.float32)
        out += coarse
    out_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_at = out_ptr + tokens_m[:, None] * stride_os + offs_v[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=kept)
    if LSE:  # natural log, in sequence order [B, H, S]
        lse_ptr += (batch * heads + head).to(tl.int64) * tokens
        lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse_ptr + tokens_m, lse, mask=in_m)
