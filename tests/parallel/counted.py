"""Ranks whose exchanges are written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from omni_attn.parallel import Parallel
from omni_attn.parallel.collectives import Collectives


class CountedCollectives:
    """Passes everything on, and notes what each exchange sends."""

    def __init__(self, inner: Collectives) -> None:
        self.inner, self.size, self.rank = inner, inner.size, inner.rank
        self.sent: list[int] = []

    def start_all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        self.sent.append(rows.numel())
        return self.inner.start_all_to_all(rows, send, receive)

    def start_all_gather(self, rows: Tensor) -> Tensor:
        self.sent.append(rows.numel())
        return self.inner.start_all_gather(rows)

    def wait(self, pending: Tensor) -> Tensor:
        return self.inner.wait(pending)

    def share_counts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return self.inner.share_counts(counts)


def counted(parallel: Parallel) -> tuple[Parallel, list[int]]:
    """The same rank, and the numbers that each exchange of its Ulysses group sends."""
    group = CountedCollectives(parallel.ulysses)
    return replace(parallel, ulysses=group), group.sent
