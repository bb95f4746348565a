"""Layers on TRTLLM_ATTN's stand-ins, on made-up machines."""

from __future__ import annotations

from typing import Any

import torch

from omni_attn import Attention, use_attention_config
from omni_attn.testing import fake_device

PACKAGES = {"flashinfer-python": "0.6.18"}
DEVICES = {
    "ragged": fake_device("sm_100", packages=PACKAGES, cudnn=91900),
    "fmha_v2": fake_device("sm_90", packages=PACKAGES, cudnn=91900),
}
HEADS, SIZE = 2, 128


def build_layer(variant: str = "ragged", *, needs: dict[str, Any] | None = None, **options: Any) -> Attention:
    """A layer that chose TRTLLM_ATTN with these options."""
    spec = {"backend": "TRTLLM_ATTN", "variant": variant, **options}
    with use_attention_config({"default": spec}, platform=DEVICES[variant], dtype="bfloat16"):
        return Attention(HEADS, SIZE, role="self", **(needs or {}))


def tensors(batch: int, queries: int, keys: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random bfloat16 query, key and value."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, n, HEADS, SIZE, generator=generator).bfloat16() for n in (queries, keys, keys)
    )


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected result."""
    return float((output.double() - expected.double()).norm() / expected.double().norm())
