"""Triton kernels over rows: norms with what follows them, and sums with what goes before them, in one pass.

They compute in float32 and round once, to the dtype of their first argument. Shape letters: B batch, S rows, C
channels, H heads, D head size, P channel pairs; R rows of a table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_attn.ops.layout import on_device, unit_stride

_HEADS = 16  # of a row that one program norms and turns
_CHANNELS = 2048  # of a row that one program activates


@triton.jit
def _norm_modulate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    shift_ptr,
    scale_ptr,
    rows_ptr,
    out_ptr,
    stride_xb,
    stride_xs,
    stride_shift,
    stride_scale,
    length,
    channels,
    table_rows,
    eps,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, place = row // length, row % length
    offs = tl.arange(0, BLOCK)
    inside = offs < channels
    x = tl.load(x_ptr + batch * stride_xb + place * stride_xs + offs, mask=inside, other=0.0).to(tl.float32)
    entry = tl.load(rows_ptr + place).to(tl.int64)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / channels + eps)
    # Behind the sum, so that fewer registers are in use at once and more rows run side by side.
    normed *= tl.load(weight_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    # An index outside of the table reads nothing; its row comes out as NaN.
    known = offs < tl.where((entry >= 0) & (entry < table_rows), channels, 0)
    scale = tl.load(scale_ptr + entry * stride_scale + offs, mask=known, other=float("nan")).to(tl.float32)
    out = normed * (1.0 + scale)
    out += tl.load(shift_ptr + entry * stride_shift + offs, mask=known, other=float("nan")).to(tl.float32)
    tl.store(out_ptr + row * channels + offs, out.to(out_ptr.dtype.element_ty), mask=inside)


def modulated_rms_norm(
    x_BSC: torch.Tensor,
    weight_C: torch.Tensor,
    eps: float,
    shift_RC: torch.Tensor,
    scale_RC: torch.Tensor,
    rows_S: torch.Tensor,
) -> torch.Tensor:
    """`rms_norm(x) * weight * (1 + scale[rows]) + shift[rows]`, contiguous, in x's dtype.

    Args:
        rows_S: int32 or int64, which row of the tables belongs to each row of x.
    """
    batch, length, channels = x_BSC.shape
    x, shift, scale = unit_stride(x_BSC), unit_stride(shift_RC), unit_stride(scale_RC)
    out = x.new_empty(batch, length, channels)
    if out.numel():
        with on_device(x):
            _norm_modulate_kernel[(batch * length,)](
                x,
                weight_C.contiguous(),
                shift,
                scale,
                rows_S.contiguous(),
                out,
                x.stride(0),
                x.stride(1),
                shift.stride(0),
                scale.stride(0),
                length,
                channels,
                shift.shape[0],
                eps,
                BLOCK=triton.next_power_of_2(channels),
                num_warps=8,
            )
    return out


@triton.jit
def _gated_sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    gate_ptr,
    rows_ptr,
    out_ptr,
    stride_xb,
    stride_xs,
    stride_yb,
    stride_ys,
    stride_gate,
    length,
    channels,
    table_rows,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, place = row // length, row % length
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < channels
    entry = tl.load(rows_ptr + place).to(tl.int64)
    known = offs < tl.where((entry >= 0) & (entry < table_rows), channels, 0)
    gate = tl.load(gate_ptr + entry * stride_gate + offs, mask=known, other=float("nan")).to(tl.float32)
    x = tl.load(x_ptr + batch * stride_xb + place * stride_xs + offs, mask=inside).to(tl.float32)
    y = tl.load(y_ptr + batch * stride_yb + place * stride_ys + offs, mask=inside).to(tl.float32)
    tl.store(out_ptr + row * channels + offs, (x + gate * y).to(out_ptr.dtype.element_ty), mask=inside)


def gated_sum(
    x_BSC: torch.Tensor, y_BSC: torch.Tensor, gate_RC: torch.Tensor, rows_S: torch.Tensor
) -> torch.Tensor:
    """`x + gate[rows] * y`, contiguous, in x's dtype; rows_S as for modulated_rms_norm."""
    batch, length, channels = x_BSC.shape
    x, y, gate = unit_stride(x_BSC), unit_stride(y_BSC), unit_stride(gate_RC)
    out = x.new_empty(batch, length, channels)
    if out.numel():
        block = min(_CHANNELS, triton.next_power_of_2(channels))
        with on_device(x):
            _gated_sum_kernel[(batch * length, triton.cdiv(channels, block))](
                x,
                y,
                gate,
                rows_S.contiguous(),
                out,
                x.stride(0),
                x.stride(1),
                y.stride(0),
                y.stride(1),
                gate.stride(0),
                length,
                channels,
                gate.shape[0],
                BLOCK=block,
                num_warps=4,
            )
    return out


@triton.jit
def _norm_rotate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    stride_xb,
    stride_xs,
    stride_xh,
    stride_cos,
    stride_sin,
    length,
    heads,
    eps,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, place = row // length, row % length
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    inside = (head < heads) & (pair < P)
    source = x_ptr + batch * stride_xb + place * stride_xs + head * stride_xh
    target = out_ptr + (row * heads + head) * D
    first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + P + pair, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(first * first + second * second, 1)
    if D > 2 * P:
        channel = 2 * P + tl.arange(0, BLOCK_R)[None, :]
        rest_inside = (head < heads) & (channel < D)
        rest = tl.load(source + channel, mask=rest_inside, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
    inverse = tl.rsqrt(squares / D + eps)[:, None]
    if D > 2 * P:
        weight = tl.load(weight_ptr + channel, mask=channel < D, other=0.0).to(tl.float32)
        tl.store(target + channel, (rest * inverse * weight).to(out_ptr.dtype.element_ty), mask=rest_inside)
    first *= inverse * tl.load(weight_ptr + pair, mask=pair < P, other=0.0).to(tl.float32)
    second *= inverse * tl.load(weight_ptr + P + pair, mask=pair < P, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + place * stride_cos + pair, mask=pair < P, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + place * stride_sin + pair, mask=pair < P, other=0.0).to(tl.float32)
    tl.store(target + pair, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(target + P + pair, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)


def rotated_rms_norm(
    x_BSHD: torch.Tensor, weight_D: torch.Tensor, eps: float, cos_SP: torch.Tensor, sin_SP: torch.Tensor
) -> torch.Tensor:
    """`rms_norm(x) * weight` of each head, channels c and c + P of it turned for c < P; contiguous, in x's dtype."""
    batch, length, heads, size = x_BSHD.shape
    pairs = cos_SP.shape[1]
    x, cos, sin = unit_stride(x_BSHD), unit_stride(cos_SP), unit_stride(sin_SP)
    out = x.new_empty(batch, length, heads, size)
    if out.numel():
        with on_device(x):
            _norm_rotate_kernel[(batch * length, triton.cdiv(heads, _HEADS))](
                x,
                weight_D.contiguous(),
                cos,
                sin,
                out,
                x.stride(0),
                x.stride(1),
                x.stride(2),
                cos.stride(0),
                sin.stride(0),
                length,
                heads,
                eps,
                D=size,
                P=pairs,
                BLOCK_H=_HEADS,
                BLOCK_P=triton.next_power_of_2(pairs),
                BLOCK_R=triton.next_power_of_2(max(1, size - 2 * pairs)),
                num_warps=4,
            )
    return out


@triton.jit
def _swiglu_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    stride_x,
    channels,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < channels
    value = tl.load(x_ptr + row * stride_x + offs, mask=inside).to(tl.float32)
    gate = tl.load(x_ptr + row * stride_x + channels + offs, mask=inside).to(tl.float32)
    out = value * gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * channels + offs, out.to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(x_SC: torch.Tensor) -> torch.Tensor:
    """`value * SiLU(gate)` of rows [..., 2C] that hold values, then gates: [..., C], contiguous, in x's dtype."""
    channels = x_SC.shape[-1] // 2
    x = unit_stride(x_SC.reshape(-1, 2 * channels))
    out = x.new_empty(*x_SC.shape[:-1], channels)
    if out.numel():
        block = min(_CHANNELS, triton.next_power_of_2(channels))
        with on_device(x):
            _swiglu_kernel[(x.shape[0], triton.cdiv(channels, block))](
                x, out, x.stride(0), channels, BLOCK=block, num_warps=4
            )
    return out
