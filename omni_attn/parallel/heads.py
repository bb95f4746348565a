"""Which heads each rank of a Ulysses group attends with.

Nothing is padded: ranks get consecutive heads, some one group of heads more than others, and queries stay with their
keys. Where there are too few key-value heads for that, or where it evens out the query heads, each is repeated first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from omni_attn.errors import ConfigError
from omni_attn.parallel.shards import Shards, Span


@dataclass(frozen=True)
class HeadSplit:
    """The heads of each rank.

    Attributes:
        query, key: spans of query heads and of repeated key-value heads, one of each for every rank.
        repeat: how often each key-value head is repeated, one copy behind the other, before they are split.
    """

    query: tuple[Span, ...]
    key: tuple[Span, ...]
    repeat: int

    def counts(self, rank: int) -> tuple[int, int]:
        """Query heads and key-value heads of a rank."""
        (first_q, end_q), (first_k, end_k) = self.query[rank], self.key[rank]
        return end_q - first_q, end_k - first_k

    def cut(self, at_most: int) -> tuple[HeadSplit, ...]:
        """The same heads in as many equal pieces of each rank's as there can be; one where ranks have none, or repeat.

        Args:
            at_most: pieces.
        """
        kv_heads = [end - start for start, end in self.key]
        if self.repeat > 1 or 0 in kv_heads:
            return (self,)
        pieces = max(n for n in range(1, at_most + 1) if math.gcd(*kv_heads) % n == 0)
        return tuple(
            HeadSplit(
                query=tuple(_piece(span, number, pieces) for span in self.query),
                key=tuple(_piece(span, number, pieces) for span in self.key),
                repeat=1,
            )
            for number in range(pieces)
        )


def _piece(span: Span, number: int, pieces: int) -> Span:
    """One of so many equal pieces of a span."""
    start, end = span
    size = (end - start) // pieces
    return start + number * size, start + (number + 1) * size


def split_heads(
    num_heads: int, num_kv_heads: int, ranks: int, *, role: str, uneven: str = "spread"
) -> HeadSplit:
    """The split whose busiest rank has the fewest query heads, and of those the one that repeats least.

    Args:
        num_heads, num_kv_heads: heads of the layer, the second a divisor of the first.
        ranks: of the Ulysses group.
        role: of the layer, for error texts.
        uneven: "spread", or "refuse" for heads that `ranks` does not divide.

    Raises:
        ConfigError: ranks do not divide the heads, and that was to be refused.
    """
    if uneven == "refuse" and (num_heads % ranks or num_kv_heads % ranks):
        common = [n for n in range(1, num_kv_heads + 1) if num_heads % n == 0 and num_kv_heads % n == 0]
        raise ConfigError(
            f'parallel.ulysses_degree: role "{role}" has {num_heads} query heads and {num_kv_heads} key-value heads, '
            f"which {ranks} ranks do not share evenly. Set ulysses_degree to one of {common}, or uneven_heads: spread"
        )
    ratio = num_heads // num_kv_heads
    repeats = [count for count in range(1, ratio + 1) if ratio % count == 0]
    splits = [_split(num_kv_heads * repeat, ratio // repeat, ranks, repeat) for repeat in repeats]
    return min(splits, key=lambda split: (max(split.counts(rank)[0] for rank in range(ranks)), split.repeat))


def _split(groups: int, queries: int, ranks: int, repeat: int) -> HeadSplit:
    """So many key-value heads, each with so many query heads, over the ranks."""
    spans = Shards.even(groups, ranks).spans
    return HeadSplit(tuple((first * queries, end * queries) for first, end in spans), spans, repeat)
