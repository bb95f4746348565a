"""Which tokens each rank holds: consecutive ones, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Span = tuple[int, int]
"""Tokens from the first number up to, not including, the second."""


@dataclass(frozen=True)
class Shards:
    """A sequence in consecutive pieces, one for each rank; a piece may be empty."""

    sizes: tuple[int, ...]

    @classmethod
    def even(cls, total: int, ranks: int) -> Shards:
        """Pieces that differ by one token at most, the longer ones first."""
        least, more = divmod(total, ranks)
        return cls(tuple(least + (rank < more) for rank in range(ranks)))

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.sizes)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where each piece lies."""
        ends = tuple(accumulate(self.sizes))
        return tuple((end - size, end) for end, size in zip(ends, self.sizes, strict=True))

    def joined(self, neighbours: int) -> Shards:
        """The pieces of so many consecutive ranks as one."""
        return Shards(
            tuple(
                sum(self.sizes[first : first + neighbours]) for first in range(0, len(self.sizes), neighbours)
            )
        )


def count_tokens(spans: Sequence[Span]) -> int:
    """How many tokens the spans have."""
    return sum(end - start for start, end in spans)


def count_within(spans: Sequence[Span], length: int) -> int:
    """How many tokens of the spans are among the first `length` of the sequence."""
    return sum(max(0, min(end, length) - start) for start, end in spans)
