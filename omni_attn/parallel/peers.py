"""Exchanges through memory that all ranks of a group see: each lays its parcels ready, and fetches those for itself.

On GPUs of one host copy engines fetch, and the processors stay with the kernels that run beside an exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from omni_attn.parallel.collectives import Collectives, Connected, Pending
from omni_attn.parallel.copies import is_recorded
from omni_attn.parallel.outbox import Counts, Outbox, Rows

_ALIGNED = 16
"""Bytes that a parcel starts at a multiple of."""


class Region(Protocol):
    """As much memory on each rank, which all of them read."""

    def view(self, owner: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """So many numbers [count] of a rank's memory, from the byte `start`."""

    def reading(self) -> AbstractContextManager[None]:
        """What is done inside begins when all ranks have come here, and runs beside what the caller does next."""

    def give_back(self) -> None:
        """What the caller does next comes after all ranks have read; the region may be taken again."""


class PeerMemory(Protocol):
    """The regions of one group. All ranks take and give back alike."""

    def take(self, size: int) -> Region:
        """A region of at least so many bytes that no rank reads any more."""


class _PeerOutbox(NamedTuple):
    """Parcels for other ranks in a region, and the own one where it is to arrive.

    Attributes:
        apart: bytes from one parcel in the region to the next.
        arrived: [sum(counts.receive)], the own parcel in its place.
        rank: whose it is.
    """

    region: Region
    apart: int
    arrived: Tensor
    counts: Counts
    rank: int

    def parcels(self, ranks: range) -> Iterator[tuple[range, Tensor]]:
        """See Outbox."""
        for rank in ranks:
            yield range(rank, rank + 1), self.place(rank).unsqueeze(0)

    def place(self, rank: int) -> Tensor:
        """Where the parcel for a rank is to be laid."""
        if rank == self.rank:
            return self.arrived.split_with_sizes(list(self.counts.receive))[rank]
        return self.parcel(self.rank, rank, self.counts.send[rank])

    def parcel(self, owner: int, reader: int, count: int) -> Tensor:
        """Numbers [count] that lie in a rank's memory for another one."""
        others = len(self.counts.send)
        slot = 0 if self.counts.to_one else (reader - owner - 1) % others
        return self.region.view(owner, self.apart * slot, count, self.arrived.dtype)


class _Arriving(NamedTuple):
    rows: Tensor
    region: Region


class PeerCollectives(Connected):
    """A group that exchanges all with all through memory.

    What has a gradient, what torch.compile traces and exchanges whose largest parcel is not stated go as in `inner`.
    Each rank decides so by itself: all have to compile the same code, or none.

    Args:
        inner: the same ranks.
        memory: theirs.
    """

    way = "through one another's memory"

    def __init__(self, inner: Collectives, memory: PeerMemory) -> None:
        self.inner, self.memory = inner, memory
        self.size, self.rank = inner.size, inner.rank
        # What nobody waits for, since an error came between, is still read and written.
        self._under_way: dict[int, _Arriving] = {}

    def outbox(self, sources: Sequence[Tensor], counts: Counts) -> Outbox:
        """See Collectives."""
        if _goes_through_memory(sources, counts):
            return self._outbox(sources[0], counts)
        return self.inner.outbox(sources, counts._replace(largest=0))  # that is settled

    def start_all_to_all(self, outbox: Outbox) -> Pending:
        """See Collectives."""
        if isinstance(outbox, Rows) and _goes_through_memory([outbox.rows], outbox.counts):
            outbox = self._laid_ready(*outbox)
        if not isinstance(outbox, _PeerOutbox):
            return self.inner.start_all_to_all(outbox)
        places = outbox.arrived.split_with_sizes(list(outbox.counts.receive))
        with outbox.region.reading():
            # Each begins with another one, so that no rank serves all others at once.
            for owner in ((self.rank + step) % self.size for step in range(1, self.size)):
                if len(places[owner]):
                    places[owner].copy_(outbox.parcel(owner, self.rank, len(places[owner])))
        arriving = _Arriving(outbox.arrived, outbox.region)
        self._under_way[id(arriving.rows)] = arriving
        return arriving

    def start_all_gather(self, rows: Tensor) -> Pending:
        """See Collectives."""
        return self.inner.start_all_gather(rows)

    def wait(self, pending: Pending) -> Tensor:
        """See Collectives."""
        if not isinstance(pending, _Arriving):
            return self.inner.wait(pending)
        pending.region.give_back()
        del self._under_way[id(pending.rows)]
        return pending.rows

    def share_counts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """See Collectives."""
        return self.inner.share_counts(counts)

    def _outbox(self, like: Tensor, counts: Counts) -> _PeerOutbox:
        apart = -(-counts.largest * like.element_size() // _ALIGNED) * _ALIGNED
        region = self.memory.take(apart * (1 if counts.to_one else self.size - 1))
        arrived = like.new_empty(sum(counts.receive))
        return _PeerOutbox(region, apart, arrived, counts, self.rank)

    def _laid_ready(self, rows: Tensor, counts: Counts) -> _PeerOutbox:
        """The same rows in an outbox of this group."""
        outbox = self._outbox(rows, counts)
        for rank, parcel in enumerate(rows.split_with_sizes(list(counts.send))):
            outbox.place(rank).copy_(parcel)
        return outbox


def _goes_through_memory(sources: Sequence[Tensor], counts: Counts) -> bool:
    """Whether an exchange does, where all ranks have gradients and compiled code alike."""
    return bool(counts.largest) and not is_recorded(sources) and not torch.compiler.is_compiling()
