"""Collectives of processes, on torch.distributed's functional collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from omni_attn.parallel.collectives import Group, Pending
from omni_attn.parallel.copies import is_recorded
from omni_attn.parallel.outbox import Outbox, Rows

# torch 2.13 renamed it, and warns of the former name; the former one may go with the last torch that lacks the new.
_all_gather: Any = (
    getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
)
_all_gather_plain: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


class GroupCollectives(Group):
    """Collectives of a torch.distributed process group.

    Args:
        group: NCCL on GPUs, gloo on the CPU.
        way: see Collectives.
    """

    def __init__(self, group: dist.ProcessGroup, way: str = "") -> None:
        self.group, self.way = group, way
        self.size, self.rank = group.size(), group.rank()

    def start_all_to_all(self, outbox: Outbox) -> Pending:
        """See Collectives."""
        assert isinstance(outbox, Rows)
        rows, (send, receive, *_) = outbox
        # Before torch 2.13 the differentiable operators do not run in inference mode.
        differentiable, plain = functional.all_to_all_single_autograd, functional.all_to_all_single
        return (differentiable if is_recorded([rows]) else plain)(rows, list(receive), list(send), self.group)

    def start_all_gather(self, rows: Tensor) -> Pending:
        """See Collectives."""
        return (_all_gather if is_recorded([rows]) else _all_gather_plain)(rows, 0, self.group)

    def wait(self, pending: Pending) -> Tensor:
        """See Collectives."""
        arrived: Tensor = functional.wait_tensor(pending)  # type: ignore[no-untyped-call]
        return arrived

    def share_counts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """See Collectives."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, tuple(counts), group=self.group)
        return tuple(found)
