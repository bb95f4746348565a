"""The Triton kernel that writes new keys and values into a paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_attn.ops.layout import on_device, unit_stride

_ROWS = 4  # tokens of one program
_CHANNELS = 1024  # of all heads of a token, at once


@triton.jit
def store_kept(source, target, inside, inverse, SCALED: tl.constexpr, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(source, mask=inside, other=0.0)
    if SCALED:
        x = x.to(tl.float32) * inverse
    if FP8:  # beyond its range there is NaN only
        x = x.to(tl.float32)
        x = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(target, x.to(target.dtype.element_ty), mask=inside)


@triton.jit
def write_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    value_ptr,
    cache_ptr,
    slots_ptr,
    stride_kt,
    stride_kg,
    stride_vt,
    stride_vg,
    stride_page,
    stride_kv,
    stride_place,
    stride_head,
    tokens,
    num_slots,
    inverse_key_scale,
    inverse_value_scale,
    P: tl.constexpr,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, place_in_head = (channel // D).to(tl.int64), channel % D
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    named = (slot >= 0) & (slot < num_slots)
    inside = named[:, None] & (channel < CHANNELS)[None, :]
    target = (slot // P) * stride_page + (slot % P) * stride_place
    target = cache_ptr + target[:, None] + (head * stride_head + place_in_head)[None, :]
    row = token.to(tl.int64)[:, None]
    source = row * stride_kt + (head * stride_kg + place_in_head)[None, :]
    store_kept(key_ptr + source, target, inside, inverse_key_scale, SCALED, FP8)
    source = row * stride_vt + (head * stride_vg + place_in_head)[None, :]
    store_kept(value_ptr + source, target + stride_kv, inside, inverse_value_scale, SCALED, FP8)


def write_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """See write_kv_cache, whose arguments were checked."""
    # Slots may be a column of a table of slots: a view with gaps, which the kernel would read as if there were none.
    key, value, slot_mapping = unit_stride(key), unit_stride(value), unit_stride(slot_mapping)
    pages, _, size, groups, head_size = kv_cache.shape
    tokens, channels = slot_mapping.shape[0], groups * head_size
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    if not tokens:
        return
    with on_device(key):
        write_kernel[(triton.cdiv(tokens, _ROWS), triton.cdiv(channels, block))](
            key,
            value,
            kv_cache,
            slot_mapping,
            *key.stride()[:2],
            *value.stride()[:2],
            *kv_cache.stride()[:4],
            tokens,
            pages * size,
            1.0 / key_scale,
            1.0 / value_scale,
            P=size,
            D=head_size,
            CHANNELS=channels,
            ROWS=_ROWS,
            BLOCK=block,
            SCALED=(key_scale, value_scale) != (1.0, 1.0),
            FP8=kv_cache.dtype == torch.float8_e4m3fn,
            num_warps=4,
        )
