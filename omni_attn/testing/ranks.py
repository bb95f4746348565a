"""Ranks in one process: threads that exchange tensors in memory, for tests of what is split over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from omni_attn.config import ParallelConfig
from omni_attn.parallel.collectives import Group, Pending
from omni_attn.parallel.context import Parallel, use_parallel
from omni_attn.parallel.outbox import Outbox, Rows

Result = TypeVar("Result")
_WAIT = 60.0


class ThreadCollectives(Group):
    """Collectives of a group of threads.

    Gradients flow through an exchange from one thread into another, so that a backward pass of the sum of all ranks'
    results, in one thread, is what backward passes on all ranks give.
    """

    def __init__(self, group: _Threads, rank: int) -> None:
        self._group, self.rank, self.size = group, rank, group.size

    def start_all_to_all(self, outbox: Outbox) -> Pending:
        """See omni_attn.parallel.collectives.Collectives."""
        assert isinstance(outbox, Rows)
        rows, (send, receive, *_) = outbox
        assert rows.shape[0] == sum(send), (
            f"rank {self.rank} holds {rows.shape[0]} rows, and sends {list(send)}"
        )
        parcels = rows.split_with_sizes(list(send))
        arrived = [theirs[self.rank] for theirs in self._group.exchange(self.rank, parcels)]
        found = [part.shape[0] for part in arrived]
        assert found == list(receive), f"rank {self.rank} expects {list(receive)} rows, and gets {found}"
        return torch.cat(arrived)

    def start_all_gather(self, rows: Tensor) -> Pending:
        """See omni_attn.parallel.collectives.Collectives."""
        brought = self._group.exchange(self.rank, rows)
        shapes = {tuple(part.shape) for part in brought}
        assert len(shapes) == 1, f"ranks gather pieces of unequal shapes {shapes}"
        return torch.cat(brought)

    def wait(self, pending: Pending) -> Tensor:
        """See omni_attn.parallel.collectives.Collectives."""
        arrived: Tensor = pending
        return arrived

    def share_counts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """See omni_attn.parallel.collectives.Collectives."""
        return tuple(map(tuple, self._group.exchange(self.rank, counts)))


class _Threads:
    def __init__(self, size: int) -> None:
        self.size = size
        self._slots: list[Any] = [None] * size
        self._all_there = threading.Barrier(size)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What every rank brought, once all are there."""
        self._slots[rank] = value
        self._all_there.wait(_WAIT)
        brought = list(self._slots)
        self._all_there.wait(_WAIT)  # nobody brings the next value before all have looked
        return brought

    def abort(self) -> None:
        self._all_there.abort()


def fake_ranks(config: ParallelConfig | dict[str, Any], work: Callable[[Parallel], Result]) -> list[Result]:
    """What `work` gives on each rank of a configuration; layers built in it are split over the ranks.

    Raises:
        The first error that a rank raised of its own; ranks that wait for it stop.
    """
    made = config if isinstance(config, ParallelConfig) else ParallelConfig.model_validate(config)
    ulysses, ring = made.ulysses_degree, made.ring_degree
    everyone = _Threads(made.size)
    inner = [_Threads(ulysses) for _ in range(made.size // ulysses)]
    outer = [_Threads(ring) for _ in range(made.size // ring)]
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(rank: int) -> Result:
        parallel = Parallel(
            made,
            ThreadCollectives(everyone, rank),
            ThreadCollectives(inner[rank // ulysses], rank % ulysses),
            ThreadCollectives(
                outer[rank % ulysses + rank // (ulysses * ring) * ulysses], rank // ulysses % ring
            ),
        )
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad), use_parallel(parallel):
                return work(parallel)
        except BaseException:
            for group in (everyone, *inner, *outer):
                group.abort()
            raise

    with ThreadPoolExecutor(made.size) as pool:
        futures = [pool.submit(run, rank) for rank in range(made.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in (*own, *errors):
        raise error
    return [future.result() for future in futures]
