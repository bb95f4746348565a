"""Quantised values of FLASHINFER_ATTN: what a spec may ask for, and how they are made."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from omni_attn.config import AttentionSpec
from omni_attn.facts import AttentionRequest, DeviceInfo

FP8_MAX = 448.0
_FP8 = "fp8_e4m3"
_SIXTEEN_BITS = ("float16", "bfloat16")


def wants_fp8(spec: AttentionSpec | None) -> bool:
    """Whether a spec asks for quantised values."""
    return spec is not None and spec.quant is not None and spec.quant.dtype_vo == _FP8


def with_fp8_variant(spec: AttentionSpec | None) -> AttentionSpec | None:
    """The spec with the only variant that quantises values, where it asks for that and names none."""
    if spec is not None and wants_fp8(spec) and spec.variant is None:
        return spec.model_copy(update={"variant": "cute-dsl"})
    return spec


def quant_reasons(request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None) -> Iterator[str]:
    """Why this backend cannot honour a spec's quant block; nothing if it can."""
    quant = None if spec is None else spec.quant
    if spec is None or quant is None:
        return
    if quant.dtype_qk not in (None, *_SIXTEEN_BITS):
        yield f"needs quant.dtype_qk float16 or bfloat16, found {quant.dtype_qk}"
    if quant.dtype_vo not in (None, *_SIXTEEN_BITS, _FP8):
        yield f"needs quant.dtype_vo float16, bfloat16 or {_FP8}, found {quant.dtype_vo}"
    computed = quant.dtype_qk or request.dtype
    if quant.dtype_vo in _SIXTEEN_BITS and computed not in (None, quant.dtype_vo):
        yield f"needs quant.dtype_vo {computed} (the type of queries and keys) or {_FP8}, found {quant.dtype_vo}"
    if wants_fp8(spec):
        if spec.variant not in (None, "cute-dsl"):
            yield f"needs variant cute-dsl for quant.dtype_vo {_FP8}, found {spec.variant}"
        if device.capability is None or device.capability.major != 10:
            yield f"needs compute capability 10.x for quant.dtype_vo {_FP8}, found {device.capability or device.kind}"
    defaults = type(quant)()
    for name in ("q_block_size", "k_block_size"):
        default, found = getattr(defaults, name), getattr(quant, name)
        if found != default:
            yield f"needs quant.{name} {default} (values have one scale per tensor here), found {found}"


def quantise_values(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values as float8_e4m3fn and their one scale, 0-dim in the values' dtype: value = quantised * scale.

    The scale is max |value| / 448 (at least 1e-6), rounded to the values' dtype before it divides, so that the output
    is multiplied by the very number that divided. Nothing is read back from the device.
    """
    low, high = value.aminmax()
    largest = torch.maximum(high, -low).float()
    scale = (largest / FP8_MAX).clamp(min=1e-6).to(value.dtype)
    return (value / scale).to(torch.float8_e4m3fn), scale
