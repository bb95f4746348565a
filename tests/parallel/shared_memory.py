"""Memory that the threads of fake ranks share, in place of what GPUs see of one another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from omni_attn.parallel import Parallel
from omni_attn.parallel.collectives import Collectives
from omni_attn.parallel.peers import PeerCollectives
from omni_attn.testing.ranks import ThreadCollectives


class ThreadMemory:
    """Every region is new, and what was read is spoilt."""

    def __init__(self, group: ThreadCollectives) -> None:
        self.group = group
        self.taken: list[int] = []

    def take(self, size: int) -> ThreadRegion:
        self.taken.append(size)
        own = torch.full((size,), 0xFF, dtype=torch.uint8)
        everyone = self.group._group.exchange(self.group.rank, own)
        assert {len(each) for each in everyone} == {size}, "ranks take regions of one size"
        return ThreadRegion(self, everyone)


class ThreadRegion:
    def __init__(self, memory: ThreadMemory, everyone: list[Tensor]) -> None:
        self.memory, self.everyone = memory, everyone
        self.given_back = False

    def view(self, owner: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
        assert not self.given_back
        return self.everyone[owner][start : start + count * dtype.itemsize].view(dtype)

    @contextmanager
    def reading(self) -> Iterator[None]:
        group = self.memory.group
        group._group.exchange(group.rank, None)
        yield
        group._group.exchange(group.rank, None)
        self.everyone[group.rank].fill_(0xFF)

    def give_back(self) -> None:
        self.given_back = True


def through_memory(parallel: Parallel) -> Parallel:
    """The same rank, whose Ulysses group and ring exchange through memory."""

    def own(group: Collectives) -> Collectives:
        if group.size == 1:
            return group
        assert isinstance(group, ThreadCollectives)
        return PeerCollectives(group, ThreadMemory(group))

    return replace(parallel, ulysses=own(parallel.ulysses), ring=own(parallel.ring))
