"""Where the queries and keys of each request lie, for attention of ragged requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class RaggedBounds:
    """Requests behind one another in [T, ...] and [S, ...].

    Attributes:
        query_start_loc, key_start_loc: int32 [R + 1] on the device; query_starts, key_starts: the same on the host.
        key_lens: int32 [R] on the device, how many of a request's keys are used: at most those between its starts.
        max_query_len: longest query.
    """

    query_start_loc: torch.Tensor
    query_starts: tuple[int, ...]
    key_start_loc: torch.Tensor
    key_starts: tuple[int, ...]
    key_lens: torch.Tensor
    max_query_len: int

    @property
    def num_tokens(self) -> int:
        """T of all requests."""
        return self.query_starts[-1]

    @property
    def num_keys(self) -> int:
        """S of all requests."""
        return self.key_starts[-1]

    def on_host(self) -> Iterator[tuple[int, int, int, int]]:
        """Of each request its first and last query, and its first and last key; last ones exclusive."""
        for (first, last), (start, end) in zip(
            pairwise(self.query_starts), pairwise(self.key_starts), strict=True
        ):
            yield first, last, start, end
