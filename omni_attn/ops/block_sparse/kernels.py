"""Where the Triton kernels take the place of torch: on GPUs with Triton, where no gradient is asked for."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

_MODULES = ("triton_pack", "triton_rows", "triton_select")


def kernels_for(*tensors: torch.Tensor) -> Any | None:
    """The kernels' launchers by name; None where torch's operators are used instead."""
    first = tensors[0]
    if first.device.type not in ("cuda", "xpu") or first.dtype == torch.float64:
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    return _kernels()


@lru_cache(maxsize=1)
def _kernels() -> Any | None:
    if find_spec("triton") is None:
        return None
    found: dict[str, Any] = {}
    for name in _MODULES:
        found |= vars(import_module(f"omni_attn.ops.block_sparse.{name}"))
    return SimpleNamespace(**found)
