"""The compute capability, for kernels whose own block sizes differ between generations of GPUs."""

from __future__ import annotations

import functools

import torch


@functools.cache
def capability_major(device: torch.device) -> int:
    """The first number of a CUDA device's compute capability."""
    return torch.cuda.get_device_capability(device)[0]
