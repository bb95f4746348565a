"""The Triton kernels of the gradients of block-sparse attention.

Legend: M query rows, N key rows, D and V channels. Scores are recomputed as the forward computes them: from operands as
they are, scaled in float32. Groups of rows and their lists: see triton_groups.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_rows(ptr, rows, offs, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [N] of a dense [rows, SIZE] tensor as [N, BLOCK], with zeros behind SIZE."""
    at = ptr + rows[:, None] * SIZE + offs[None, :]
    if SIZE == BLOCK:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(offs < SIZE)[None, :], other=0.0)
    return tile


@triton.jit
def _query_step(  # type: ignore[no-untyped-def]
    acc,
    q,
    grad,
    lse,
    delta,
    k_ptr,
    v_ptr,
    entry,
    scale,
    offs_n,
    offs_d,
    offs_v,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What BLOCK_N key rows add to the gradient of the queries."""
    rows = ((entry >> 5) * GROUP + offs_n % GROUP).to(tl.int64)
    if MASKED:
        # Rows that fill up the last step are anybody's: their NaN must not come in.
        valid = offs_n % GROUP < (entry & 31)
        k_at, v_at = k_ptr + rows[:, None] * D + offs_d[None, :], v_ptr + rows[:, None] * DV + offs_v[None, :]
        k = tl.load(k_at, mask=valid[:, None] & (offs_d < D)[None, :], other=0.0)
        v = tl.load(v_at, mask=valid[:, None] & (offs_v < DV)[None, :], other=0.0)
    else:
        k = _load_rows(k_ptr, rows, offs_d, D, BLOCK_D)
        v = _load_rows(v_ptr, rows, offs_v, DV, BLOCK_V)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        scores = tl.where(valid[None, :], scores, float("-inf"))
    p = tl.exp2(scores - lse[:, None])
    grad_p = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    grad_s = (p * (grad_p - delta[:, None])).to(k.dtype)
    return tl.dot(grad_s, k, acc, input_precision=PRECISION)


@triton.jit
def grad_query_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    grad_ptr,
    lse_ptr,
    grad_q_ptr,
    q_rows_ptr,
    grad_rows_ptr,
    lse_rows_ptr,
    delta_rows_ptr,
    entries_ptr,
    steps_ptr,
    order_ptr,
    tiles_ptr,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_gb,
    stride_gs,
    stride_gh,
    query_rows,
    key_rows,
    num_blocks,
    tokens,
    length,
    scale,
    heads_per_group,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One query tile of one head: tiles [items, 4] are triton_groups.row_tiles.

    Written besides the gradient [B, S, H, D]: packed rows of queries and output gradients, and of each row the
    log-sum-exp in base 2 (infinite where there is no key, so that every weight becomes zero) and delta.
    """
    item, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    block = tl.load(tiles_ptr + item * 4)
    first = tl.load(tiles_ptr + item * 4 + 1)
    first_row = tl.load(tiles_ptr + item * 4 + 2)
    count = tl.load(tiles_ptr + item * 4 + 3)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_V)
    in_m, in_d, in_v = offs_m < count, offs_d < D, offs_v < DV
    tokens_m = tl.load(order_ptr + first + offs_m, mask=in_m, other=0).to(tl.int64)
    head_of = (batch * heads + head).to(tl.int64)

    q_at = (
        q_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + tokens_m[:, None] * stride_qs
    )
    q = tl.load(q_at + offs_d[None, :], mask=in_m[:, None] & in_d[None, :], other=0.0)
    grad_at = (
        grad_ptr
        + batch.to(tl.int64) * stride_gb
        + head.to(tl.int64) * stride_gh
        + tokens_m[:, None] * stride_gs
    )
    grad = tl.load(grad_at + offs_v[None, :], mask=in_m[:, None] & in_v[None, :], other=0.0)
    places = ((batch.to(tl.int64) * tokens + tokens_m) * heads + head)[:, None]  # rows of [B, S, H]
    out = tl.load(out_ptr + places * DV + offs_v[None, :], mask=in_m[:, None] & in_v[None, :], other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse = tl.load(lse_ptr + head_of * tokens + tokens_m, mask=in_m, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)

    rows = head_of * query_rows + first_row + offs_m
    in_rows = offs_m < (count + GROUP - 1) // GROUP * GROUP
    tl.store(lse_rows_ptr + rows, lse, mask=in_rows)
    tl.store(delta_rows_ptr + rows, delta, mask=in_rows)
    tl.store(q_rows_ptr + rows[:, None] * D + offs_d[None, :], q, mask=in_rows[:, None] & in_d[None, :])
    tl.store(
        grad_rows_ptr + rows[:, None] * DV + offs_v[None, :], grad, mask=in_rows[:, None] & in_v[None, :]
    )

    group_of = (batch * (heads // heads_per_group) + head // heads_per_group).to(tl.int64)
    k_ptr += group_of * key_rows * D
    v_ptr += group_of * key_rows * DV
    row = head_of * num_blocks + block
    unmasked = tl.load(steps_ptr + row * 2)
    steps = tl.load(steps_ptr + row * 2 + 1)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    per_step: tl.constexpr = BLOCK_N // GROUP
    # One step ahead in registers: an address is never waited for.
    entries_at = entries_ptr + row * length + offs_n // GROUP
    entry = tl.load(entries_at)
    log2_scale = scale * 1.4426950408889634
    for step in tl.range(0, unmasked, num_stages=STAGES):
        ahead = tl.load(entries_at + (step + 1) * per_step)
        acc = _query_step(
            acc, q, grad, lse, delta, k_ptr, v_ptr, entry, log2_scale, offs_n, offs_d, offs_v,
            D, DV, BLOCK_D, BLOCK_V, GROUP, False, PRECISION,
        )  # fmt: skip
        entry = ahead
    for step in tl.range(unmasked, steps, num_stages=1):
        ahead = tl.load(entries_at + (step + 1) * per_step)
        acc = _query_step(
            acc, q, grad, lse, delta, k_ptr, v_ptr, entry, log2_scale, offs_n, offs_d, offs_v,
            D, DV, BLOCK_D, BLOCK_V, GROUP, True, PRECISION,
        )  # fmt: skip
        entry = ahead
    grad_q = (acc * scale).to(grad_q_ptr.dtype.element_ty)
    tl.store(grad_q_ptr + places * D + offs_d[None, :], grad_q, mask=in_m[:, None] & in_d[None, :])


@triton.jit
def grad_key_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    k_ptr,
    v_ptr,
    grad_k_ptr,
    grad_v_ptr,
    entries_ptr,
    starts_ptr,
    launch_ptr,
    order_ptr,
    tiles_ptr,
    query_rows,
    key_rows,
    num_blocks,
    tokens,
    scale,
    heads_per_group,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One key tile of one group of heads; launch [B, G, items] orders the tiles, the longest lists first."""
    group, batch = tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    group_of = (batch * groups + group).to(tl.int64)
    item = tl.load(launch_ptr + group_of * tl.num_programs(0) + tl.program_id(0))
    block = tl.load(tiles_ptr + item * 4)
    first = tl.load(tiles_ptr + item * 4 + 1)
    first_row = tl.load(tiles_ptr + item * 4 + 2)
    count = tl.load(tiles_ptr + item * 4 + 3)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_V)
    # Rows behind the tile's are zeros here; whatever becomes of them is not stored.
    in_n, in_d, in_v = offs_n < count, offs_d < D, offs_v < DV
    rows = group_of * key_rows + first_row + offs_n
    k = tl.load(k_ptr + rows[:, None] * D + offs_d[None, :], mask=in_n[:, None] & in_d[None, :], other=0.0)
    v = tl.load(v_ptr + rows[:, None] * DV + offs_v[None, :], mask=in_n[:, None] & in_v[None, :], other=0.0)

    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    per_step: tl.constexpr = BLOCK_M // GROUP
    log2_scale = scale * 1.4426950408889634
    for member in range(heads_per_group):
        head_of = group_of * heads_per_group + member
        list_of = starts_ptr + head_of * num_blocks + block
        start = tl.load(list_of)
        steps = ((tl.load(list_of + 1) - start) // per_step).to(tl.int32)
        entries_at = entries_ptr + start + offs_m // GROUP
        entry = tl.load(entries_at)
        for step in tl.range(0, steps, num_stages=STAGES):
            ahead = tl.load(entries_at + (step + 1) * per_step)
            rows_m = head_of * query_rows + ((entry >> 5) * GROUP + offs_m % GROUP)
            q = _load_rows(q_ptr, rows_m, offs_d, D, BLOCK_D)
            grad = _load_rows(grad_ptr, rows_m, offs_v, DV, BLOCK_V)
            delta = tl.load(delta_ptr + rows_m)
            lse = tl.load(lse_ptr + rows_m)
            # Rows that fill up the last step have no weight.
            lse = tl.where(offs_m % GROUP < (entry & 31), lse, float("inf"))
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * log2_scale
            p = tl.exp2(scores - lse[None, :])
            acc_v = tl.dot(p.to(grad.dtype), grad, acc_v, input_precision=PRECISION)
            grad_p = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            grad_s = (p * (grad_p - delta[None, :])).to(q.dtype)
            acc_k = tl.dot(grad_s, q, acc_k, input_precision=PRECISION)
            entry = ahead

    tokens_n = tl.load(order_ptr + first + offs_n, mask=in_n, other=0).to(tl.int64)
    places = ((batch.to(tl.int64) * tokens + tokens_n) * groups + group)[:, None]
    grad_k = (acc_k * scale).to(grad_k_ptr.dtype.element_ty)
    grad_v = acc_v.to(grad_v_ptr.dtype.element_ty)
    tl.store(grad_k_ptr + places * D + offs_d[None, :], grad_k, mask=in_n[:, None] & in_d[None, :])
    tl.store(grad_v_ptr + places * DV + offs_v[None, :], grad_v, mask=in_n[:, None] & in_v[None, :])
