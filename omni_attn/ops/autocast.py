"""Products that keep the precision they are asked for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Where an autocast region would round the operands of matrix products on the tensor's device: not in here."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
