"""Ranks whose exchanges are looked at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from omni_attn.parallel import Parallel
from omni_attn.parallel.collectives import Collectives, Pending
from omni_attn.parallel.outbox import Rows


class PassedOn:
    """A group that passes everything on; what derives from it looks at some of it."""

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class CountedCollectives(PassedOn):
    """Notes how many numbers each exchange sends."""

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.sent: list[int] = []

    def start_all_to_all(self, outbox: Rows) -> Pending:
        self.sent.append(outbox.rows.numel())
        return self.inner.start_all_to_all(outbox)

    def start_all_gather(self, rows: Tensor) -> Pending:
        self.sent.append(rows.numel())
        return self.inner.start_all_gather(rows)


def counted(parallel: Parallel) -> tuple[Parallel, list[int]]:
    """The same rank, and the numbers that each exchange of its Ulysses group sends."""
    group = CountedCollectives(parallel.ulysses)
    return replace(parallel, ulysses=group), group.sent  # type: ignore[arg-type]
