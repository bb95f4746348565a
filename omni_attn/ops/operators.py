"""When a kernel is called through its torch.library operator, and not directly."""

from __future__ import annotations

import torch


def needs_operator(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """While compiling; and where somebody may ask a kernel without a backward for gradients.

    Such a kernel writes into new memory, where gradients would be lost without a word; its operator refuses a backward.
    """
    return torch.compiler.is_compiling() or (
        torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    )
