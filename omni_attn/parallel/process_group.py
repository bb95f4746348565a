"""Collectives of processes, on torch.distributed's functional collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from omni_attn.parallel.collectives import Connected

# torch 2.13 renamed it, and warns of the former name; the former one may go with the last torch that lacks the new.
_all_gather: Any = (
    getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
)
_all_gather_plain: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


def _records(rows: Tensor) -> bool:
    """Whether a backward pass may come: before torch 2.13 the differentiable operators do not run in inference mode."""
    return torch.is_grad_enabled() and rows.requires_grad


class GroupCollectives(Connected):
    """Collectives of a torch.distributed process group.

    Args:
        group: NCCL on GPUs, gloo on the CPU.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = group.size(), group.rank()

    def start_all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See Collectives."""
        start = functional.all_to_all_single_autograd if _records(rows) else functional.all_to_all_single
        pending: Tensor = start(rows, list(receive), list(send), self.group)
        return pending

    def start_all_gather(self, rows: Tensor) -> Tensor:
        """See Collectives."""
        pending: Tensor = (_all_gather if _records(rows) else _all_gather_plain)(rows, 0, self.group)
        return pending

    def wait(self, pending: Tensor) -> Tensor:
        """See Collectives."""
        arrived: Tensor = functional.wait_tensor(pending)  # type: ignore[no-untyped-call]
        return arrived

    def share_counts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """See Collectives."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, tuple(counts), group=self.group)
        return tuple(found)
