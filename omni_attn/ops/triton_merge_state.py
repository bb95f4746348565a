"""Triton kernel of merge_attn_states: one program per token and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_attn.ops.layout import on_device, unit_stride


@triton.jit
def _merge_kernel(  # type: ignore[no-untyped-def]
    first_ptr,
    first_lse_ptr,
    second_ptr,
    second_lse_ptr,
    out_ptr,
    lse_ptr,
    stride_at,
    stride_ah,
    stride_bt,
    stride_bh,
    stride_ot,
    stride_oh,
    stride_lah,
    stride_lat,
    stride_lbh,
    stride_lbt,
    tokens,
    size,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    infinity = float("inf")
    a = tl.load(first_lse_ptr + head * stride_lah + token * stride_lat)
    b = tl.load(second_lse_ptr + head * stride_lbh + token * stride_lbt)
    a = tl.where(a == infinity, -infinity, a)
    b = tl.where(b == infinity, -infinity, b)
    most = tl.maximum(a, b)
    anchor = tl.where(most == -infinity, 0.0, most)
    weight_a, weight_b = tl.exp(a - anchor), tl.exp(b - anchor)
    total = weight_a + weight_b
    # Where neither part has a key, nothing is read below, and zeros are written.
    divisor = tl.where(total != 0, total, 1.0)
    weight_a /= divisor
    weight_b /= divisor
    offs = tl.arange(0, BLOCK)
    inside = offs < size
    # A part that does not count may hold anything, so it is not looked at.
    counts_a = offs < tl.where(weight_a != 0, size, 0)
    counts_b = offs < tl.where(weight_b != 0, size, 0)
    part_a = tl.load(first_ptr + token * stride_at + head * stride_ah + offs, mask=counts_a, other=0.0)
    part_b = tl.load(second_ptr + token * stride_bt + head * stride_bh + offs, mask=counts_b, other=0.0)
    out = part_a.to(tl.float32) * weight_a + part_b.to(tl.float32) * weight_b
    tl.store(
        out_ptr + token * stride_ot + head * stride_oh + offs, out.to(out_ptr.dtype.element_ty), mask=inside
    )
    tl.store(lse_ptr + head * tokens + token, most + tl.log(total))


def merge_states(
    first_THD: torch.Tensor,
    first_lse_HT: torch.Tensor,
    second_THD: torch.Tensor,
    second_lse_HT: torch.Tensor,
    output_THD: torch.Tensor,
) -> torch.Tensor:
    """Writes the merged output, which may be one of the parts, and gives the merged log-sum-exp back."""
    tokens, heads, size = first_THD.shape
    lse_HT = first_lse_HT.new_empty(heads, tokens)
    if not first_THD.numel():
        return lse_HT
    first, second = unit_stride(first_THD), unit_stride(second_THD)
    out = output_THD if output_THD.stride(-1) == 1 else output_THD.new_empty(output_THD.shape)
    with on_device(first):
        _merge_kernel[(tokens, heads)](
            first,
            first_lse_HT,
            second,
            second_lse_HT,
            out,
            lse_HT,
            first.stride(0),
            first.stride(1),
            second.stride(0),
            second.stride(1),
            out.stride(0),
            out.stride(1),
            first_lse_HT.stride(0),
            first_lse_HT.stride(1),
            second_lse_HT.stride(0),
            second_lse_HT.stride(1),
            tokens,
            size,
            BLOCK=triton.next_power_of_2(size),
            num_warps=1 if size <= 128 else 4,
        )
    if out is not output_THD:
        output_THD.copy_(out)
    return lse_HT
