"""Triton kernels of the coarse stage: scores between block means, exact top-k of each row, coarse attention.

All in float32: "tf32x3" is three tensor-core products whose sum has float32 accuracy, whatever the process allows
matrix products elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.layout import on_device


@triton.jit
def _scores_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    scores_ptr,
    nq,
    nk,
    scale,
    heads_per_group,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scaled scores [B * H, nq, nk] of means [B * H, nq, D] and [B * G, nk, D]."""
    head = tl.program_id(2).to(tl.int64)
    rows = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)  # rows * nk may be beyond 32 bits
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    q_ptr += head * nq * D
    k_ptr += head // heads_per_group * nk * D
    q = tl.load(
        q_ptr + rows[:, None] * D + offs_d[None, :], mask=(rows < nq)[:, None] & in_d[None, :], other=0.0
    )
    k = tl.load(
        k_ptr + cols[None, :] * D + offs_d[:, None], mask=(cols < nk)[None, :] & in_d[:, None], other=0.0
    )
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    places = scores_ptr + head * nq * nk + rows[:, None] * nk + cols[None, :]
    tl.store(places, scores, mask=(rows < nq)[:, None] & (cols < nk)[None, :])


@triton.jit
def _best(x, ranked, number, topk):  # type: ignore[no-untyped-def]
    """Which of the `number` scores x at the places `ranked` are the topk highest; among equals the first ones.

    A binary search over the bits of the k-th highest score: as unsigned integers, floats with their sign bit turned
    (negative ones with all bits turned) are in order.
    """
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 equals 0.0
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x != x, 0x7FC00000, bits)  # NaN comes first, as when torch sorts
    keys = tl.where(bits < 0, ~bits, bits | -0x80000000).to(tl.uint32, bitcast=True)
    # Places that are not ranked have the lowest key of all, which no number has.
    keys = tl.where(ranked, keys, 0)
    kth = tl.full([], 0, tl.uint32)
    reached = number
    bit = tl.full([], 31, tl.int32)
    while (bit >= 0) & (reached != topk):  # exactly topk at or above: lower bits decide nothing
        candidate = kth | (tl.full([], 1, tl.uint32) << bit.to(tl.uint32))
        count = tl.sum((keys >= candidate).to(tl.int32), 0)
        enough = count >= topk
        kth = tl.where(enough, candidate, kth)
        reached = tl.where(enough, count, reached)
        bit -= 1
    above = keys > kth
    equal = (keys == kth) & ranked
    room = topk - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))


@triton.jit
def _topk_kernel(scores_ptr, indices_ptr, n, topk, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The topk highest of each row of n, ascending by index; among equals the lowest index."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    x = tl.load(scores_ptr + row * n + cols, mask=cols < n, other=0.0)
    chosen = _best(x, cols < n, n, topk)
    places = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(indices_ptr + row * topk + places, cols, mask=chosen)


@triton.jit
def _prefix_topk_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, indices_ptr, counts_ptr, rows, blocks, cap, dense_rows, exempt, topk, WIDTH: tl.constexpr
):
    """One row of blocks: all in the first dense_rows of `rows`, else `exempt` first ones and the topk best of the rest.

    -1 behind them. In a row with a NaN or an infinity among what is ranked, all scores count as equal.
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    inside = cols < blocks
    ranked = inside & (cols >= exempt)
    x = tl.load(scores_ptr + row * blocks + cols, mask=ranked, other=0.0)
    finite = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), 0) == WIDTH
    chosen = _best(tl.where(finite, x, 0.0), ranked, blocks - exempt, topk)
    first = tl.where(row % rows < dense_rows, blocks, exempt)
    chosen = chosen | (cols < first)
    kept = tl.sum(chosen.to(tl.int32), 0)
    indices_ptr += row * cap
    tl.store(indices_ptr + tl.cumsum(chosen.to(tl.int32), 0) - 1, cols, mask=chosen)
    tl.store(indices_ptr + cols, cols * 0 - 1, mask=(cols >= kept) & (cols < cap))
    tl.store(counts_ptr + row, kept)


@triton.jit
def _coarse_kernel(  # type: ignore[no-untyped-def]
    scores_ptr,
    v_ptr,
    out_ptr,
    nq,
    nk,
    heads_per_group,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """softmax(scores) @ value means, [B * H, nq, D]."""
    head = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(
        tl.int64
    )  # rows * nk may be beyond 32 bits
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < D
    scores_ptr += head * nq * nk
    v_ptr += head // heads_per_group * nk * D
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, nk, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        inside = (rows < nq)[:, None] & (cols < nk)[None, :]
        x = tl.load(scores_ptr + rows[:, None] * nk + cols[None, :], mask=inside, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(x, 1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp(x - shift[:, None])
        fade = tl.exp(peak - shift)
        v = tl.load(
            v_ptr + cols[:, None] * D + offs_d[None, :], mask=(cols < nk)[:, None] & in_d[None, :], other=0.0
        )
        acc = acc * fade[:, None] + tl.dot(p, v, input_precision=PRECISION)
        total = total * fade + tl.sum(p, 1)
        peak = new_peak
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    places = out_ptr + head * nq * D + rows[:, None] * D + offs_d[None, :]
    tl.store(places, out, mask=(rows < nq)[:, None] & in_d[None, :])


def float32_products(tensor: torch.Tensor) -> str:
    """How Triton gets products of float32 accuracy on the tensor's device: three TF32 ones where there are any."""
    return "tf32x3" if tensor.is_cuda and torch.version.hip is None else "ieee"


def coarse_scores(query_means: torch.Tensor, key_means: torch.Tensor, softmax_scale: float) -> torch.Tensor:
    """See means.coarse_scores; float32 means."""
    query_means, key_means = query_means.contiguous(), key_means.contiguous()
    batch, heads, nq, size = query_means.shape
    groups, nk = key_means.shape[1:3]
    scores = query_means.new_empty(batch, heads, nq, nk)
    block = 64 if size <= 128 else 32
    with on_device(scores):
        _scores_kernel[(triton.cdiv(nk, block), triton.cdiv(nq, block), batch * heads)](
            query_means,
            key_means,
            scores,
            nq,
            nk,
            softmax_scale,
            heads // groups,
            D=size,
            BLOCK_D=max(16, triton.next_power_of_2(size)),
            BLOCK=block,
            PRECISION=float32_products(scores),
            num_warps=4,
        )
    return scores


def mean_topk(scores: torch.Tensor, topk: int) -> SelectedBlocks:
    """See selectors.mean_topk; scores of at most float32."""
    scores = scores.float().contiguous()
    indices = torch.empty(*scores.shape[:-1], topk, dtype=torch.int32, device=scores.device)
    counts = torch.full(scores.shape[:-1], topk, dtype=torch.int32, device=scores.device)
    width = triton.next_power_of_2(scores.shape[-1])
    with on_device(scores):
        _topk_kernel[(scores.shape[:-1].numel(),)](
            scores, indices, scores.shape[-1], topk, WIDTH=width, num_warps=2 if width >= 512 else 1
        )
    return SelectedBlocks(indices, counts)


def prefix_dense_topk(
    scores: torch.Tensor, prefix_blocks: int, topk: int, dense_rows: int, *, compete: bool
) -> SelectedBlocks:
    """See prefix_selector.prefix_dense_topk; scores of at most float32, topk below the number of video blocks.

    Args:
        dense_rows: how many of the rows belong to the prefix.
    """
    scores = scores.float().contiguous()
    rows, blocks = scores.shape[-2:]
    exempt, ranked = (0, prefix_blocks + topk) if compete else (prefix_blocks, topk)
    cap = blocks if dense_rows else exempt + ranked
    indices = torch.empty(*scores.shape[:-1], cap, dtype=torch.int32, device=scores.device)
    counts = torch.empty(scores.shape[:-1], dtype=torch.int32, device=scores.device)
    width = triton.next_power_of_2(blocks)
    with on_device(scores):
        _prefix_topk_kernel[(counts.numel(),)](
            scores,
            indices,
            counts,
            rows,
            blocks,
            cap,
            dense_rows,
            exempt,
            ranked,
            WIDTH=width,
            num_warps=2 if width >= 512 else 1,
        )
    return SelectedBlocks(indices, counts)


def coarse_attention(
    scores: torch.Tensor, value_means: torch.Tensor, output_dtype: torch.dtype
) -> torch.Tensor:
    """See means.coarse_attention; float32 tensors.

    One TF32 product (11 bits) is enough where the sum that the result goes into is rounded to 16 bits.
    """
    scores, value_means = scores.contiguous(), value_means.contiguous()
    batch, heads, nq, nk = scores.shape
    groups, size = value_means.shape[1], value_means.shape[-1]
    output = scores.new_empty(batch, heads, nq, size)
    block_m = 128 if size <= 128 else 32
    precision = float32_products(scores)
    if precision == "tf32x3" and output_dtype != torch.float32:
        precision = "tf32"
    with on_device(scores):
        _coarse_kernel[(triton.cdiv(nq, block_m), batch * heads)](
            scores,
            value_means,
            output,
            nq,
            nk,
            heads // groups,
            D=size,
            BLOCK_D=max(16, triton.next_power_of_2(size)),
            BLOCK_M=block_m,
            BLOCK_N=32,
            PRECISION=precision,
            num_warps=8,
            num_stages=3,
        )
    return output
