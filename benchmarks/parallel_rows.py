"""The rows of benchmarks/sequence_parallel.py: checked against one rank, timed together, held against a prediction."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from benchmarks.parallel_calls import Candidate, Join
from benchmarks.parallel_ranks import RankClock, of_all_ranks
from benchmarks.rounds import MAX_ERROR, first_line, shuffled_rounds
from benchmarks.tables import markdown_table
from omni_attn.config import ParallelConfig
from omni_attn.parallel.cost import Prediction
from omni_attn.tuning.clocks import Call

Predict = Callable[[ParallelConfig, float], Prediction]
"""From a configuration and the seconds of one rank to what a call should cost."""


@dataclass
class Row:
    """What was found about one candidate.

    Attributes:
        milliseconds: median over rounds of the slowest rank, of one rank the fastest of those that ran it; where
            exchanges stood still, without them.
        error: relative, of the whole output from that of one rank; None where exchanges stood still.
        prediction: from the seconds of one rank.
        target: times as fast as one rank.
    """

    name: str
    milliseconds: float | None = None
    rounds: list[float] = field(default_factory=list)
    error: float | None = None
    prediction: Prediction | None = None
    target: float | None = None
    problem: str = ""


def measure(
    candidates: Iterable[Candidate],
    predict: Predict,
    join: Join,
    device: torch.device,
    *,
    rounds: int,
    seed: int,
    still: bool,
) -> list[Row]:
    """Errors first, then rounds of all candidates that are right.

    Args:
        candidates: the first one runs on one rank.
        join: connects the ranks of a configuration.
        still: exchanges stand still, so that numbers say nothing.
    """
    rows, right, expected = [], list[tuple[Call, Row]](), None
    passes = MAX_ERROR
    for candidate in candidates:
        row = Row(candidate.name, target=candidate.target)
        rows.append(row)
        try:
            call, whole = candidate.make(None if candidate.config is None else join(candidate.config))
            output = whole(call()) if not still else call()
            if expected is None:
                expected = output
            elif not still:
                row.problem = _judge(
                    row, output, expected, float("inf") if candidate.is_yardstick else passes
                )
                if candidate.is_yardstick and row.error is not None:
                    passes = max(passes, 2 * row.error)
        except Exception as error:  # a kernel may raise anything; the others are still measured
            row.problem = first_line(error)
        if not row.problem:
            right.append((call, row))
    clock = RankClock(device)
    for _, (call, row) in shuffled_rounds(right, rounds, seed):
        row.rounds.append(clock.milliseconds(call))
    for candidate, row in zip(candidates, rows, strict=True):
        if row.rounds:
            choose = min if candidate.config is None else max
            row.rounds = [choose(times) for times in of_all_ranks(row.rounds)]
            row.milliseconds = statistics.median(row.rounds)
        if candidate.config is not None and rows[0].milliseconds is not None:
            row.prediction = predict(candidate.config, rows[0].milliseconds / 1e3)
    return rows


def _judge(row: Row, output: torch.Tensor, expected: torch.Tensor, passes: float) -> str:
    """Fills in the error, the largest of all ranks; what is wrong with it, if something is."""
    difference = float((output.float() - expected.float()).norm() / expected.float().norm())
    (errors,) = of_all_ranks([difference])
    row.error = max(errors) if all(error == error for error in errors) else float("nan")
    if not row.error <= passes:
        return f"wrong numbers: {row.error:.1e} from one rank, at most {passes:.0e} passes"
    return ""


def measured_table(rows: list[Row]) -> str:
    """What ranks measured, beside what was predicted for them."""
    header = ("candidate", "ms", "times one rank", "predicted ms", "predicted times", "error", "target")
    base, lines = rows[0].milliseconds, []
    for row in rows:
        ms, guess = row.milliseconds, row.prediction
        times = None if ms is None or base is None else base / ms
        lines.append(
            (
                row.name,
                row.problem or f"{ms:.3f}",
                "" if times is None else f"{times:.3f}",
                "" if guess is None else f"{1e3 * guess.seconds:.3f}",
                "" if guess is None else f"{guess.speedup:.3f}",
                "" if row.error is None else f"{row.error:.1e}",
                "" if row.target is None else _held(times, row.target),
            )
        )
    return markdown_table(header, lines)


def still_table(rows: list[Row]) -> str:
    """What one device measured without exchanges, and with those of the machine's bandwidths added."""
    header = (
        "candidate",
        "ms without exchanges",
        "exchanges not hidden, ms",
        "together",
        "times one rank",
        "by the model alone",
        "target",
    )
    base, lines = rows[0].milliseconds, []
    for row in rows:
        guess = row.prediction
        if row.milliseconds is None or guess is None or base is None:
            told = row.problem or (f"{row.milliseconds:.3f}" if row.milliseconds is not None else "not timed")
            lines.append((row.name, told, "", "", "", "", ""))
            continue
        exposed = 1e3 * guess.exposed_seconds
        times = base / (row.milliseconds + exposed)
        lines.append(
            (
                row.name,
                f"{row.milliseconds:.3f}",
                f"{exposed:.3f}",
                f"{row.milliseconds + exposed:.3f}",
                f"{times:.3f}",
                f"{guess.speedup:.3f}",
                "" if row.target is None else _held(times, row.target),
            )
        )
    return markdown_table(header, lines)


def _held(times: float | None, target: float) -> str:
    return f"{target}" if times is None else f"{target}, {'met' if times >= target else 'missed'}"
