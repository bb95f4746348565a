"""What benchmarks/vsa.py holds a candidate against: float64 attention over the tiles that the candidate itself chose.

Legend: B batch, S tokens, H heads, D head size, N tiles, R sampled query rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.vsa_inputs import Inputs
from omni_attn.ops.block_sparse.executor import Executor, SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.reference import reference_attention

SAMPLED_ROWS = 64


class Reference:
    """Float64 results of one set of inputs, on sampled query rows.

    Attributes:
        rows: int64 [R].
        dense: dense attention of the rows, [B, R, H, D].
    """

    def __init__(self, inputs: Inputs, tiles: BlockPartition, scale: float) -> None:
        self._inputs, self._tiles, self._scale = inputs, tiles, scale
        generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(tiles.tokens, generator=generator)[:SAMPLED_ROWS].sort().values
        self.rows = rows.to(inputs.query.device)
        # In torch alone: the library's own means and top-k are among what is judged here.
        query_means, key_means, value_means = (_means(x, tiles) for x in inputs[:3])
        self.scores = query_means @ key_means.mT * scale
        coarse = (self.scores.softmax(-1) @ value_means)[:, :, tiles.block_of[self.rows]].transpose(1, 2)
        self._gated = coarse * inputs.gate[:, self.rows]
        self.dense, self._dense_lse = self._attention(None)

    def sparse(self, selected: torch.Tensor) -> tuple[torch.Tensor, float]:
        """VSA over the chosen tiles, bool [B, H, N, N]: rows [B, R, H, D], and the mean share of mass kept."""
        fine, lse = self._attention(selected)
        return fine + self._gated, float((lse - self._dense_lse).exp().mean())

    def exact_map(self, topk: int) -> torch.Tensor:
        """The tiles that float64 means select, bool [B, H, N, N]."""
        best = self.scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
        return torch.zeros_like(self.scores, dtype=torch.bool).scatter_(-1, best, True)

    def error(self, output: torch.Tensor, expected: torch.Tensor) -> float:
        """Relative Frobenius error of an output [B, S, H, D] on the sampled rows."""
        difference = output[:, self.rows].double() - expected
        return float(difference.norm() / expected.norm())

    def _attention(self, selected: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, R, H, D] and lse [B, H, R]; one head after the other, to bound memory."""
        outputs, lses = [], []
        block_of = self._tiles.block_of
        query = self._inputs.query[:, self.rows]
        for head in range(query.shape[2]):
            one = slice(head, head + 1)
            keep = None
            if selected is not None:
                keep = selected[:, one, block_of[self.rows]].index_select(-1, block_of)
            key, value = self._inputs.key[:, :, one], self._inputs.value[:, :, one]
            output, lse = reference_attention(
                query[:, :, one], key, value, softmax_scale=self._scale, attn_mask=keep
            )
            outputs.append(output)
            lses.append(lse)
        return torch.cat(outputs, 2), torch.cat(lses, 1)


def _means(tensor: torch.Tensor, tiles: BlockPartition) -> torch.Tensor:
    """[B, S, H, D] -> float64 [B, H, N, D]."""
    batch, _, heads, size = tensor.shape
    sums = torch.zeros(batch, tiles.num_blocks, heads, size, dtype=torch.float64, device=tensor.device)
    sums.index_add_(1, tiles.block_of, tensor.double())
    return (sums / tiles.block_sizes[:, None, None]).transpose(1, 2)


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
    """What an executor was asked to do: the tiles selected, and the times around its two parts, of all calls."""

    selected: SelectedBlocks | None = None
    marks: list[Any] = field(default_factory=list)

    def phases(self) -> dict[str, float]:
        """Milliseconds of packing with means, of scores, top-k and coarse attention, and of attending; last call."""
        start, packed, asked, done = self.marks[-4:]
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

    def noted(part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            watch.marks.append(mark())
            result = part(*arguments, **named)
            watch.marks.append(mark())
            return result

        return call

    attend = noted(executor.attend)

    def attend_noting(packed: Any, selected: SelectedBlocks, *arguments: Any, **named: Any) -> Any:
        watch.selected = selected
        return attend(packed, selected, *arguments, **named)

    with (
        patch.object(executor, "pack", noted(executor.pack)),
        patch.object(executor, "attend", attend_noting),
    ):
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
