"""From the host to a tensor that stays where it is, without waiting for the device."""

from __future__ import annotations

import torch


def copy_to_device(rows: torch.Tensor, there: torch.Tensor) -> None:
    """One copy that the device does in its own time; `rows` may be changed as soon as this returns.

    Args:
        rows: on the host.
        there: of the same shape and dtype; keeps its address.
    """
    if there.is_cuda:
        # Memory from torch's pool of pinned memory is not used again before the copy is done.
        rows = rows.pin_memory()
    there.copy_(rows, non_blocking=there.is_cuda)
