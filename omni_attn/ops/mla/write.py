"""New latents into their slots of a paged cache, and latents out of it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from omni_attn.ops.operators import is_traced
from omni_attn.ops.paged.write import (
    as_bytes,
    may_have_kernels,
    scales_of,
    scatter_tokens,
    stored,
    write_kernels,
)


def write_latents(
    latent_TC: torch.Tensor,
    rope_key_TE: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: float = 1.0,
    host_scales: torch.Tensor | None = None,
) -> None:
    """Writes each token's row [latent | rope] into its slot, in the cache's dtype; does not wait for a device.

    Args:
        latent_TC: [T, C]; rope_key_TE: [T, E]; any strides.
        kv_cache: [N, P, C + E], any strides; only named slots change.
        slot_mapping: int64 [T] or shorter, page * P + place; below 0 = not written; no slot twice. A GPU leaves slots
            behind the last page out.
        scale: what is stored is the number divided by it; host_scales: see write_kv_cache.

    Raises:
        ValueError: shapes disagree; or, on the CPU, a slot lies behind the last page.
    """
    _check(latent_TC, rope_key_TE, kv_cache, slot_mapping)
    if not slot_mapping.numel() or not kv_cache.numel():
        return
    if is_traced(latent_TC) and may_have_kernels(latent_TC):
        if host_scales is None and scale != 1.0:
            host_scales = torch.tensor((scale,), dtype=torch.float64, device="cpu")
        _write_opaquely(latent_TC, rope_key_TE, kv_cache, slot_mapping, host_scales)
    else:
        _write(latent_TC, rope_key_TE, kv_cache, slot_mapping, scale)


def _write(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: float,
) -> None:
    kernels = latent_kernels(latent, kv_cache)
    write = _write_in_torch if kernels is None else kernels.write_latent_pages
    write(latent, rope_key, kv_cache, slot_mapping, scale)


@torch.library.custom_op("omni_attn::write_latents", mutates_args=("kv_cache",))
def _write_opaquely(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    host_scales: torch.Tensor | None,
) -> None:
    """write_latents as one opaque operator, for torch.compile."""
    _write(latent, rope_key, kv_cache, slot_mapping, *scales_of(host_scales, 1))


@_write_opaquely.register_fake
def _(latent: torch.Tensor, rope_key: torch.Tensor, kv_cache: torch.Tensor, *_: object) -> None:
    return None


def latent_kernels(tensor: torch.Tensor, kv_cache: torch.Tensor) -> Any | None:
    """The module of the Triton kernel, where the one for keys and values is used, see write_kernels; else None."""
    if write_kernels(tensor, kv_cache) is None:
        return None
    return import_module("omni_attn.ops.mla.triton_write")


def _write_in_torch(
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scale: float,
) -> None:
    """The definition, on any device."""
    tokens = slot_mapping.shape[0]
    row = stored(torch.cat((latent[:tokens], rope_key[:tokens]), dim=1), scale, kv_cache.dtype)
    scatter_tokens(as_bytes(row).unsqueeze(1), as_bytes(kv_cache).unsqueeze(1), slot_mapping)


def read_latents(
    kv_cache: torch.Tensor,
    pages: torch.Tensor,
    places: torch.Tensor,
    dtype: torch.dtype,
    scale: float | torch.Tensor = 1.0,
) -> torch.Tensor:
    """Rows [..., C + E] of the cache in `dtype`, for pages and places of any one shape."""
    rows = as_bytes(kv_cache)[pages, places].view(kv_cache.dtype).to(dtype)
    return rows if isinstance(scale, float) and scale == 1.0 else rows * scale


def _check(
    latent: torch.Tensor, rope_key: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    shapes = tuple(latent.shape), tuple(rope_key.shape), tuple(kv_cache.shape)
    if [len(shape) for shape in shapes] != [2, 2, 3] or (
        shapes[0][0] != shapes[1][0] or shapes[0][1] + shapes[1][1] != shapes[2][2]
    ):
        raise ValueError(
            f"a cache of latents {shapes[2]} cannot take latents {shapes[0]} and rope keys {shapes[1]}: needs [pages, "
            "tokens of a page, channels of both], and as many rows of each"
        )
    if (
        slot_mapping.dim() != 1
        or slot_mapping.dtype != torch.int64
        or slot_mapping.shape[0] > latent.shape[0]
    ):
        raise ValueError(
            f"slot_mapping {slot_mapping.dtype} {tuple(slot_mapping.shape)}: needs int64, one per token of "
            f"{latent.shape[0]} or fewer"
        )
