"""The Triton kernels of latent attention: absorbed queries over pages of latents, and ragged requests in the open form.

Both keep a running softmax to base 2. A row without a key gives zeros and a log-sum-exp of -inf. What lies behind the
last key may be NaN and is never read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from omni_attn.ops.paged.triton_attend import request_of, widened


@triton.jit
def _online(acc, total, peak, scores, scale, v, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """One step of the softmax over scores [M, N], which `scale`, above 0, brings to base 2, and values [N, V]."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(scores * scale - shift[:, None])
    fade = tl.exp2(peak - shift)
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, total, new_peak


@triton.jit
def latent_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    qr_ptr,
    cache_ptr,
    out_ptr,
    lse_ptr,
    requests_ptr,
    lens_ptr,
    table_ptr,
    stride_qt,
    stride_qh,
    stride_rt,
    stride_rh,
    stride_page,
    stride_place,
    stride_table,
    rows,
    heads,
    splits,
    scale,
    latent_scale,
    P: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Some heads of one query over one split of its keys: out [S, T, H, C]; of splits, lse [S, T, H] to base 2."""
    parts = tl.cdiv(heads, BLOCK_H)
    row = (tl.program_id(0) // parts).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    offs_h = tl.program_id(0) % parts * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_n = tl.arange(0, BLOCK_N)
    offs_c = tl.arange(0, BLOCK_C)
    offs_e = tl.arange(0, BLOCK_E)
    in_h, in_c, in_e = offs_h < heads, offs_c < C, offs_e < E
    head = offs_h.to(tl.int64)
    q = tl.load(
        q_ptr + row * stride_qt + (head * stride_qh)[:, None] + offs_c[None, :],
        mask=in_h[:, None] & in_c[None, :],
        other=0.0,
    )
    qr = tl.load(
        qr_ptr + row * stride_rt + (head * stride_rh)[:, None] + offs_e[None, :],
        mask=in_h[:, None] & in_e[None, :],
        other=0.0,
    )
    length = tl.load(lens_ptr + row)
    table_ptr += tl.load(requests_ptr + row).to(tl.int64) * stride_table
    blocks = tl.cdiv(length, BLOCK_N)
    share = tl.cdiv(blocks, splits)
    begin = tl.program_id(1) * share
    end = tl.maximum(begin, tl.minimum(blocks, begin + share))
    whole = tl.maximum(begin, tl.minimum(end, length // BLOCK_N))

    acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    keys = begin * BLOCK_N + offs_n
    page = tl.load(table_ptr + keys // P, mask=keys < whole * BLOCK_N, other=0)
    for block in tl.range(begin, whole, num_stages=STAGES):
        keys = block * BLOCK_N + offs_n
        behind = keys + BLOCK_N
        ahead = tl.load(table_ptr + behind // P, mask=behind < whole * BLOCK_N, other=0)
        place = page.to(tl.int64) * stride_page + (keys % P).to(tl.int64) * stride_place
        at = cache_ptr + place[:, None]
        if C == BLOCK_C:
            k = tl.load(at + offs_c[None, :])
        else:
            k = tl.load(at + offs_c[None, :], mask=in_c[None, :], other=0)
        if E == BLOCK_E:
            kr = tl.load(at + C + offs_e[None, :])
        else:
            kr = tl.load(at + C + offs_e[None, :], mask=in_e[None, :], other=0)
        k, kr = widened(k, q.dtype, BITS), widened(kr, q.dtype, BITS)
        scores = tl.dot(qr, kr.T, input_precision=PRECISION)
        scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
        acc, total, peak = _online(acc, total, peak, scores, scale, k, PRECISION)
        page = ahead
    if whole < end:  # the last block of the last split
        keys = whole * BLOCK_N + offs_n
        inside = keys < length
        page = tl.load(table_ptr + keys // P, mask=inside, other=0)
        place = page.to(tl.int64) * stride_page + (keys % P).to(tl.int64) * stride_place
        at = cache_ptr + place[:, None]
        k = tl.load(at + offs_c[None, :], mask=inside[:, None] & in_c[None, :], other=0)
        kr = tl.load(at + C + offs_e[None, :], mask=inside[:, None] & in_e[None, :], other=0)
        k, kr = widened(k, q.dtype, BITS), widened(kr, q.dtype, BITS)
        scores = tl.dot(qr, kr.T, input_precision=PRECISION)
        scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        acc, total, peak = _online(acc, total, peak, scores, scale, k, PRECISION)

    out = acc * (latent_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    at = (split * rows + row) * heads + head
    tl.store(
        out_ptr + (at * C)[:, None] + offs_c[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=in_h[:, None] & in_c[None, :],
    )
    if SPLIT:
        lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(total))
        tl.store(lse_ptr + at, lse, mask=in_h)


@triton.jit
def ragged_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    kr_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    query_starts_ptr,
    key_starts_ptr,
    lens_ptr,
    stride_qt,
    stride_qh,
    stride_ks,
    stride_kh,
    stride_rs,
    stride_vs,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_lh,
    num_reqs,
    scale,
    CAUSAL: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_M queries of one request and head. Tiles are numbered by request_of; lse [H, T], natural."""
    # Late tiles of a causal request have most to do: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    request = request_of(tile, query_starts_ptr, num_reqs, 1, BLOCK_M)
    start = tl.load(query_starts_ptr + request)
    count = tl.load(query_starts_ptr + request + 1) - start
    first = (tile - (start // BLOCK_M + request)) * BLOCK_M
    if first >= count:
        return
    key_start = tl.load(key_starts_ptr + request).to(tl.int64)
    length = tl.load(lens_ptr + request)

    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_k, offs_e, offs_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_V)
    in_m, in_k, in_e, in_v = first + offs_m < count, offs_k < K, offs_e < E, offs_v < V
    rows = (start + first + offs_m).to(tl.int64)
    at = q_ptr + (rows * stride_qt + head * stride_qh)[:, None]
    q = tl.load(at + offs_k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
    qr = tl.load(at + K + offs_e[None, :], mask=in_m[:, None] & in_e[None, :], other=0.0)
    k_ptr += key_start * stride_ks + head * stride_kh
    kr_ptr += key_start * stride_rs
    v_ptr += key_start * stride_vs + head * stride_vh

    position = length - count + first + offs_m
    end = length
    seen = length
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(length, length - count + first + BLOCK_M))
        seen = tl.maximum(0, tl.minimum(length, length - count + first + 1))
    whole = seen // BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for block in tl.range(0, whole, num_stages=STAGES):
        keys = (block * BLOCK_N + offs_n).to(tl.int64)
        if K == BLOCK_K:
            k = tl.load(k_ptr + (keys * stride_ks)[:, None] + offs_k[None, :])
        else:
            k = tl.load(k_ptr + (keys * stride_ks)[:, None] + offs_k[None, :], mask=in_k[None, :], other=0.0)
        if E == BLOCK_E:
            kr = tl.load(kr_ptr + (keys * stride_rs)[:, None] + offs_e[None, :])
        else:
            kr = tl.load(
                kr_ptr + (keys * stride_rs)[:, None] + offs_e[None, :], mask=in_e[None, :], other=0.0
            )
        if V == BLOCK_V:
            v = tl.load(v_ptr + (keys * stride_vs)[:, None] + offs_v[None, :])
        else:
            v = tl.load(v_ptr + (keys * stride_vs)[:, None] + offs_v[None, :], mask=in_v[None, :], other=0.0)
        scores = tl.dot(qr, kr.T, input_precision=PRECISION)
        scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
        acc, total, peak = _online(acc, total, peak, scores, scale, v, PRECISION)
    for block in tl.range(whole, tl.cdiv(end, BLOCK_N), num_stages=1):
        place = block * BLOCK_N + offs_n
        inside, keys = place < length, place.to(tl.int64)
        there = inside[:, None]
        k = tl.load(
            k_ptr + (keys * stride_ks)[:, None] + offs_k[None, :], mask=there & in_k[None, :], other=0.0
        )
        kr = tl.load(
            kr_ptr + (keys * stride_rs)[:, None] + offs_e[None, :], mask=there & in_e[None, :], other=0.0
        )
        v = tl.load(
            v_ptr + (keys * stride_vs)[:, None] + offs_v[None, :], mask=there & in_v[None, :], other=0.0
        )
        scores = tl.dot(qr, kr.T, input_precision=PRECISION)
        scores = tl.dot(q, k.T, scores, input_precision=PRECISION)
        valid = inside[None, :]
        if CAUSAL:
            valid = valid & (place[None, :] <= position[:, None])
        scores = tl.where(valid, scores, float("-inf"))
        acc, total, peak = _online(acc, total, peak, scores, scale, v, PRECISION)

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = out_ptr + (rows * stride_ot + head * stride_oh)[:, None] + offs_v[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_v[None, :])
    lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(total)) * 0.6931471805599453)
    tl.store(lse_ptr + head * stride_lh + rows, lse, mask=in_m)
