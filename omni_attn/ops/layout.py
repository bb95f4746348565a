"""Memory layouts that kernels ask for."""

from __future__ import annotations

import torch


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its last dimension lies dense in memory, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
