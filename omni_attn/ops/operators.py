"""When a kernel is called through its torch.library operator, and not directly."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def needs_operator(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """While compiling; and where somebody may ask a kernel without a backward for gradients.

    Such a kernel writes into new memory, where gradients would be lost without a word; its operator refuses a backward.
    """
    return torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    )


def is_traced(query: torch.Tensor) -> bool:
    """While compiling, and for a FakeTensor outside of it: what is kept for later calls would be made of fakes."""
    return torch.compiler.is_compiling() or isinstance(query, FakeTensor)
