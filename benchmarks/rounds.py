"""Candidates for one piece of work, each held against what it should compute and then timed in alternating rounds."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from benchmarks.vsa_checks import watched
from omni_attn.ops.block_sparse.executor import Executor
from omni_attn.tuning.clocks import Call, clock_for, peak_bytes

# Dense attention takes longer than all else and serves as a base only: timed once in so many rounds.
DENSE_EVERY = 4
# Past this a result is no bfloat16 rounding any more, and is not timed.
MAX_ERROR = 2e-2
# About 2 ms of an H200: the host has queued all launches of a call, of whichever candidate, before the call begins.
FLUSHES = 32

Item = TypeVar("Item")


def _nothing() -> None: ...


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to compute one call.

    Attributes:
        kind: "ours", "peer" (from raster order to raster order), "peer kernel" (from tile order to tile order) or
            "dense".
        call: what is timed.
        selected: the tiles that it attends to, bool [B, H, N, N]; None = every token.
        raster: its output in raster order.
        release: lets go of what it keeps from one call to the next.
        executor: whose two parts are timed on their own, where there is one.
    """

    name: str
    kind: str
    call: Call
    selected: Callable[[], torch.Tensor] | None = None
    raster: Callable[[torch.Tensor], torch.Tensor] = lambda output: output
    release: Callable[[], None] = _nothing
    executor: Executor | None = None


@dataclass
class Row:
    """What was found about one candidate.

    Attributes:
        milliseconds: median of the rounds; None where it was not timed, for the reason in `problem`.
        error: relative Frobenius error of the sampled rows against float64 over the candidate's own tiles.
        as_exact: share of its tiles that float64 means choose too; None for dense attention.
        peak_bytes: most memory above the inputs; None on a CPU.
        phases: medians of an executor's parts.
    """

    name: str
    kind: str
    milliseconds: float | None = None
    rounds: list[float] = field(default_factory=list)
    error: float | None = None
    as_exact: float | None = None
    peak_bytes: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    problem: str = ""


def measure(
    found: Iterable[Candidate | tuple[str, Exception]],
    check: Callable[[Candidate, Row], float],
    device: torch.device,
    *,
    rounds: int,
    seed: int,
) -> list[Row]:
    """Errors and memory first, then rounds that alternate between the candidates that are right.

    Args:
        found: candidates, or the name of one that is not here and the reason.
        check: the error of a candidate, which may fill in more of its row.
    """
    rows, right = [], list[tuple[Candidate, Row]]()
    for candidate in found:
        if isinstance(candidate, tuple):
            rows.append(Row(candidate[0], "absent", problem=first_line(candidate[1])))
            continue
        row = Row(candidate.name, candidate.kind)
        rows.append(row)
        try:
            _judge(candidate, row, check(candidate, row), device)
        except Exception as error:  # a kernel may raise anything; the others are still measured
            row.problem = first_line(error)
        if not row.problem:
            right.append((candidate, row))
    clock = clock_for(device, FLUSHES)
    for number, (candidate, row) in shuffled_rounds(right, rounds, seed):
        if candidate.kind != "dense" or number % DENSE_EVERY == 0:
            row.rounds.append(clock.milliseconds(candidate.call))
    for candidate, row in right:
        row.milliseconds = statistics.median(row.rounds)
        row.phases = _phases(candidate, device, rounds)
    return rows


def shuffled_rounds(items: Iterable[Item], rounds: int, seed: int) -> Iterator[tuple[int, Item]]:
    """The number of a round and an item, for all items in each round, each round in another order.

    A kernel leaves its clock to the next one: on an H200, up to 11 % of the time.
    """
    shuffled, generator = list(items), random.Random(seed)
    for number in range(rounds):
        generator.shuffle(shuffled)
        for item in shuffled:
            yield number, item


def _judge(candidate: Candidate, row: Row, error: float, device: torch.device) -> None:
    if not error <= MAX_ERROR:  # NaN is no number either
        row.problem = f"wrong numbers: error {error:.1e}, at most {MAX_ERROR:.0e} passes"
        return
    row.error = error
    candidate.release()
    if device.type == "cuda":  # elsewhere no memory is counted
        gc.collect()
    row.peak_bytes = peak_bytes(candidate.call, device)


def _phases(candidate: Candidate, device: torch.device, rounds: int) -> dict[str, float]:
    """Medians over some calls, each behind a flush."""
    if candidate.executor is None:
        return {}
    clock, found = clock_for(device, FLUSHES), list[dict[str, float]]()
    for _ in range(min(rounds, 5)):
        with watched(candidate.executor, device) as watch:
            clock.milliseconds(candidate.call)
            found.append(watch.phases())
    return {name: statistics.median(phases[name] for phases in found) for name in found[0]}


def first_line(error: Exception) -> str:
    """An error in one line of a table."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160] if text else 'no text'}"
