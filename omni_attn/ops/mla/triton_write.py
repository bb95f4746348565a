"""The Triton kernel that writes latents into a paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_attn.ops.layout import on_device, unit_stride
from omni_attn.ops.paged.triton_write import store_kept
from omni_attn.ops.paged.write import FP8

_ROWS = 4  # tokens of one program


@triton.jit
def write_latents_kernel(  # type: ignore[no-untyped-def]
    latent_ptr,
    rope_ptr,
    cache_ptr,
    slots_ptr,
    stride_lt,
    stride_rt,
    stride_page,
    stride_place,
    tokens,
    num_slots,
    inverse_scale,
    P: tl.constexpr,
    C: tl.constexpr,
    E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    named = ((slot >= 0) & (slot < num_slots))[:, None]
    target = cache_ptr + ((slot // P) * stride_page + (slot % P) * stride_place)[:, None]
    row = token.to(tl.int64)[:, None]
    channel = tl.arange(0, BLOCK_C)[None, :]
    source = latent_ptr + row * stride_lt + channel
    store_kept(source, target + channel, named & (channel < C), inverse_scale, SCALED, FP8)
    channel = tl.arange(0, BLOCK_E)[None, :]
    source = rope_ptr + row * stride_rt + channel
    store_kept(source, target + C + channel, named & (channel < E), inverse_scale, SCALED, FP8)


def write_latent_pages(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """See write_latents, whose arguments were checked."""
    latent, rope_key, slot_mapping = unit_stride(latent), unit_stride(rope_key), unit_stride(slot_mapping)
    pages, size, _ = kv_cache.shape
    tokens, channels, rope = slot_mapping.shape[0], latent.shape[1], rope_key.shape[1]
    with on_device(latent):
        write_latents_kernel[(triton.cdiv(tokens, _ROWS),)](
            latent,
            rope_key,
            kv_cache,
            slot_mapping,
            latent.stride(0),
            rope_key.stride(0),
            *kv_cache.stride()[:2],
            tokens,
            pages * size,
            1.0 / scale,
            P=size,
            C=channels,
            E=rope,
            BLOCK_C=triton.next_power_of_2(channels),
            BLOCK_E=triton.next_power_of_2(rope),
            ROWS=_ROWS,
            SCALED=scale != 1.0,
            FP8=kv_cache.dtype == FP8,
            num_warps=4,
        )
