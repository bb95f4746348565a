"""New keys and values into their slots of a paged cache: in torch, and where it is decided whether Triton does it."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from omni_attn.ops.operators import is_traced

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest number of float8_e4m3fn; what lies above is stored as it."""


def write_kv_cache(
    key_TGD: torch.Tensor,
    value_TGD: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    host_scales: torch.Tensor | None = None,
) -> None:
    """Writes each token's key and value into its slot, in the cache's dtype; does not wait for a device.

    Args:
        key_TGD, value_TGD: [T, G, D], any strides.
        kv_cache: [N, 2, P, G, D], any strides; only named slots change.
        slot_mapping: int64 [T] or shorter, any stride, page * P + place; below 0 = not written; no slot twice. A GPU
            leaves slots behind the last page out: whoever makes slots on the host refuses them there.
        key_scale, value_scale: what is stored is the number divided by it.
        host_scales: both once more, float64 [2] on the CPU, for compiled code, see CacheScales; None = it takes them
            for constants.

    Raises:
        ValueError: shapes disagree; or, on the CPU, a slot lies behind the last page.
    """
    check_write(key_TGD, value_TGD, kv_cache, slot_mapping)
    if is_traced(key_TGD) and may_have_kernels(key_TGD):
        if host_scales is None and (key_scale != 1.0 or value_scale != 1.0):
            host_scales = torch.tensor((key_scale, value_scale), dtype=torch.float64, device="cpu")
        _write_opaquely(key_TGD, value_TGD, kv_cache, slot_mapping, host_scales)
    else:
        _write(key_TGD, value_TGD, kv_cache, slot_mapping, key_scale, value_scale)


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    kernels = write_kernels(key, kv_cache)
    write = write_in_torch if kernels is None else kernels.write_pages
    write(key, value, kv_cache, slot_mapping, key_scale, value_scale)


@torch.library.custom_op("omni_attn::write_kv_cache", mutates_args=("kv_cache",))
def _write_opaquely(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    host_scales: torch.Tensor | None,
) -> None:
    """write_kv_cache as one opaque operator, for torch.compile."""
    _write(key, value, kv_cache, slot_mapping, *scales_of(host_scales, 2))


@_write_opaquely.register_fake
def _(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, *_: object) -> None:
    return None


def scales_of(host_scales: torch.Tensor | None, count: int) -> tuple[float, ...]:
    """The scales that an operator was handed; None = 1."""
    return (1.0,) * count if host_scales is None else tuple(host_scales.tolist())


def may_have_kernels(tensor: torch.Tensor) -> bool:
    """Whether Triton may write such tensors; while tracing, where nothing more is asked: elsewhere torch is traced."""
    return tensor.device.type in ("cuda", "xpu") and tensor.dtype != torch.float64


def write_kernels(tensor: torch.Tensor, kv_cache: torch.Tensor) -> Any | None:
    """The module of the Triton kernel; None without a GPU or Triton, and in float64.

    None as well for fp8 on a GPU without that dtype, where torch rounds, and for a cache whose D is not dense.
    """
    if not may_have_kernels(tensor):
        return None
    if kv_cache.stride(-1) != 1:
        return None
    return None if kv_cache.dtype == FP8 and not _has_fp8(tensor.device) else _kernels()


@lru_cache(maxsize=16)
def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@lru_cache(maxsize=1)
def _kernels() -> Any | None:
    return None if find_spec("triton") is None else import_module("omni_attn.ops.paged.triton_write")


def check_write(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Raises ValueError where the shapes of a write disagree."""
    expected = (kv_cache.shape[0], 2, kv_cache.shape[2], *key.shape[1:]) if kv_cache.dim() == 5 else None
    if key.dim() != 3 or key.shape != value.shape or tuple(kv_cache.shape) != expected:
        raise ValueError(
            f"a KV cache {tuple(kv_cache.shape)} cannot take keys {tuple(key.shape)} and values {tuple(value.shape)}: "
            "needs [pages, 2, tokens of a page, kv heads, head size] and [tokens, kv heads, head size] of both"
        )
    if slot_mapping.dim() != 1 or slot_mapping.dtype != torch.int64 or slot_mapping.shape[0] > key.shape[0]:
        raise ValueError(
            f"slot_mapping {slot_mapping.dtype} {tuple(slot_mapping.shape)}: needs int64, one per token of "
            f"{key.shape[0]} or fewer"
        )


def stored(tensor: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What a cache of `dtype` keeps of a tensor."""
    scaled = tensor if scale == 1.0 else tensor.float() / scale
    return (scaled.float().clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else scaled).to(dtype)


def write_in_torch(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """The definition, on any device, see write_kv_cache."""
    tokens = slot_mapping.shape[0]
    if not tokens:
        return
    parts = (
        stored(key[:tokens], key_scale, kv_cache.dtype),
        stored(value[:tokens], value_scale, kv_cache.dtype),
    )
    scatter_tokens(torch.stack([as_bytes(part) for part in parts], dim=1), as_bytes(kv_cache), slot_mapping)


def scatter_tokens(new: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Copies rows of `new` [T, K, ...] into their slots of cache [N, K, P, ...]; slots below 0 are left out.

    Raises:
        ValueError: on the CPU, a slot lies behind the last page.
    """
    pages, _, size = cache.shape[:3]
    if slot_mapping.device.type == "cpu" and not is_traced(slot_mapping):
        if int(slot_mapping.max()) >= pages * size:
            raise ValueError(
                f"slot {int(slot_mapping.max())} lies behind the last one of {pages} pages of {size} tokens, "
                f"{pages * size - 1}: allocate more pages, or evict"
            )
        written = slot_mapping >= 0
        slots, new = slot_mapping[written], new[written]
    else:
        # Without knowing how many are written: the others repeat the first one that is, or what stands there already.
        written = slot_mapping >= 0
        first = written.int().argmax()
        source = torch.where(written, torch.arange(new.shape[0], device=written.device), first)
        slots = slot_mapping[source].clamp(min=0)
        kept = cache[slots // size, :, slots % size]
        new = torch.where(written.any(), new[source], kept)
    cache[slots // size, :, slots % size] = new


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view that torch's indexing knows: not all of it takes fp8."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
