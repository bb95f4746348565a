"""What one rank is going to send in an exchange of all with all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class Counts(NamedTuple):
    """The rows of an exchange of all with all, as one rank sees it.

    Attributes:
        send, receive: rows for each rank, and from each.
        largest: at least the rows of the largest parcel between any two ranks, the same number on all ranks there are,
            those of other groups too; rows are single numbers then. 0 = not stated, or nothing is sent, and the
            exchange goes the way that needs no such agreement.
        to_one: every rank of the group sends to one other alone.
    """

    send: Sequence[int]
    receive: Sequence[int]
    largest: int = 0
    to_one: bool = False


class Outbox(Protocol):
    """What one rank is going to send in an exchange of all with all, to be filled by it."""

    def parcels(self, ranks: range) -> Iterator[tuple[range, Tensor]]:
        """The parcels of consecutive ranks that get equally many rows.

        Returns:
            Some of the ranks and their parcels [ranks, rows of one, ...], until all ranks had their turn.
        """


class Rows(NamedTuple):
    """An outbox in one tensor.

    Attributes:
        rows: [sum(counts.send), ...], contiguous, those for rank 0 first.
        counts: for each rank, and from each.
    """

    rows: Tensor
    counts: Counts

    def parcels(self, ranks: range) -> Iterator[tuple[range, Tensor]]:
        """See Outbox."""
        first, each = sum(self.counts.send[: ranks.start]), self.counts.send[ranks.start]
        own = self.rows[first : first + len(ranks) * each]
        yield ranks, own.view(len(ranks), each, *own.shape[1:])
