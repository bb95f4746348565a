"""What benchmarks/vsa.py holds a candidate against: float64 attention over the tiles that the candidate itself chose.

Legend: B batch, S tokens, H heads, D head size, N tiles, R sampled query rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.sampled import SampledRows, best_blocks
from benchmarks.vsa_inputs import Inputs
from omni_attn.ops.block_sparse.executor import Executor, SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition


class Reference:
    """Float64 results of one set of inputs, on sampled query rows.

    Attributes:
        rows: int64 [R].
        dense: dense attention of the rows, [B, R, H, D].
    """

    def __init__(self, inputs: Inputs, tiles: BlockPartition, scale: float) -> None:
        self._sampled, self._tiles = SampledRows(*inputs[:3], scale), tiles
        self.rows = self._sampled.rows
        self.scores = self._sampled.scores(tiles)
        self._gated = self._sampled.coarse(tiles) * inputs.gate[:, self.rows]
        self.dense, self._dense_lse = self._sampled.dense
        self.error = self._sampled.error

    def sparse(self, selected: torch.Tensor) -> tuple[torch.Tensor, float]:
        """VSA over the chosen tiles, bool [B, H, N, N]: rows [B, R, H, D], and the mean share of mass kept."""
        fine, lse = self._sampled.over(selected, self._tiles)
        return fine + self._gated, float((lse - self._dense_lse).exp().mean())

    def exact_map(self, topk: int) -> torch.Tensor:
        """The tiles that float64 means select, bool [B, H, N, N]."""
        return best_blocks(self.scores, topk)


def as_map(selected: SelectedBlocks, num_blocks: int) -> torch.Tensor:
    """Lists of tiles as a bool map [B, H, N, N]."""
    chosen = (
        torch.arange(selected.indices.shape[-1], device=selected.counts.device) < selected.counts[..., None]
    )
    found = torch.zeros(*selected.counts.shape, num_blocks, dtype=torch.int32, device=selected.counts.device)
    found.scatter_add_(-1, selected.indices.long().where(chosen, 0), chosen.int())
    return found > 0


def shared(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean share of the first map's tiles that are in the second too, both bool [..., N]."""
    return float(((one & other).sum(-1) / one.sum(-1).clamp(min=1)).mean())


def neighbour_overlap(selected: torch.Tensor) -> float:
    """Mean share of tiles that a query tile's list has in common with that of the tile before it, in tile order."""
    return shared(selected[..., 1:, :], selected[..., :-1, :])


@dataclass
class Watch:
    """What an executor was asked to do: the tiles selected, and the times around its two parts, of the last call."""

    selected: SelectedBlocks | None = None
    marks: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def phases(self) -> dict[str, float]:
        """Milliseconds of packing with means, of scores, top-k and coarse attention, and of attending."""
        (start, packed), (asked, done) = self.marks["pack"], self.marks["attend"]
        return {
            "pack": _between(start, packed),
            "select": _between(packed, asked),
            "attend": _between(asked, done),
        }


@contextmanager
def watched(executor: Executor, device: torch.device) -> Iterator[Watch]:
    """Within it, calls through the executor are noted down."""
    watch = Watch()
    mark = _mark_event if device.type == "cuda" else time.perf_counter

    def noted(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if name == "attend":  # (packed, selected, ...)
                watch.selected = arguments[1]
            start = mark()
            result = part(*arguments, **named)
            watch.marks[name] = start, mark()
            return result

        return call

    with ExitStack() as patches:
        for method, name in (("pack", "pack"), ("attend", "attend"), ("attend_with_summaries", "attend")):
            if hasattr(executor, method):
                patches.enter_context(patch.object(executor, method, noted(name, getattr(executor, method))))
        yield watch


def _mark_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return 1e3 * float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end))
