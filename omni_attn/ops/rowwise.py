"""Work on each row of a sequence by itself, which a GPU does in one pass where torch's operators take several.

Who calls a kernel from here has the same function in torch beside it: the definition, and what a compiler fuses by
itself.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from omni_attn.ops.operators import is_traced


def rowwise_kernels(*tensors: torch.Tensor) -> Any | None:
    """The module of Triton kernels; None where torch's operators are used instead.

    That is without a GPU or Triton, in float64, while tracing, and where a gradient is asked for.
    """
    first = tensors[0]
    if first.device.type not in ("cuda", "xpu") or first.dtype == torch.float64 or is_traced(first):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    return _kernels()


@lru_cache(maxsize=1)
def _kernels() -> Any | None:
    return None if find_spec("triton") is None else import_module("omni_attn.ops.triton_rowwise")
