"""The generated parts of docs/sequence_parallel.md: what each strategy costs, and which backends serve it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from omni_attn.config.parallel import ParallelConfig
from omni_attn.overview import backend_rows, built_in_facts
from omni_attn.parallel.cost import AttentionCall, Prediction, predict
from omni_attn.parallel.machines import H200

CALLS = {
    "Wan 14B, 720p, 81 frames: 75600 tokens, 40 heads of 128": AttentionCall(
        tokens=75600, heads=40, head_size=128
    ),
    "MiniMax-H3, 768p, 124 frames: 37740 tokens, 56 heads of 128": AttentionCall(
        tokens=37740, heads=56, head_size=128
    ),
    "Wan 1.3B, 480p, 81 frames: 32760 tokens, 12 heads of 128": AttentionCall(
        tokens=32760, heads=12, head_size=128
    ),
}
PLANS = {
    2: (
        {"ulysses_degree": 2},
        {"ulysses_degree": 2, "head_pieces": 2},
        {"ring_degree": 2},
        {"allgather_degree": 2},
    ),
    8: (
        {"ulysses_degree": 8},
        {"ulysses_degree": 4, "ring_degree": 2},
        {"ulysses_degree": 2, "ring_degree": 4},
        {"ring_degree": 8},
        {"allgather_degree": 8},
    ),
    64: (
        {"ulysses_degree": 64},
        {"ulysses_degree": 16, "ring_degree": 4},
        {"ulysses_degree": 8, "ring_degree": 8},
        {"ulysses_degree": 4, "ring_degree": 16},
        {"ring_degree": 64},
        {"allgather_degree": 64},
    ),
}
COLUMNS = (
    "ranks",
    "degrees",
    "sent, MB",
    "compute, ms",
    "copies, ms",
    "exchanges, ms",
    "not hidden, ms",
    "together, ms",
    "times one rank",
    "efficiency",
)
MODES = ("ulysses", "ring", "ulysses_ring", "allgather_kv")


class PlanError(Exception):
    """The page lacks a marker."""


def with_generated(text: str) -> str:
    """The page with its generated parts written anew.

    Raises:
        PlanError: the page has no place for one of them.
    """
    for name, block in {"plan": plan(), "backends": backends()}.items():
        start, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        if text.count(start) != 1 or text.count(end) != 1 or text.find(end) < text.find(start):
            raise PlanError(
                f"docs/sequence_parallel.md needs both markers once and in order: {start} and {end}"
            )
        before, _, rest = text.partition(start)
        text = f"{before}{start}\n{block}\n{end}{rest.partition(end)[2]}"
    return text


def plan() -> str:
    """A table for each call; of each number of ranks the fastest is bold."""
    parts = []
    for name, call in CALLS.items():
        lines: list[Sequence[str]] = []
        for ranks, plans in PLANS.items():
            found = [predict(call, ParallelConfig.model_validate(degrees), H200) for degrees in plans]
            fastest = min(prediction.seconds for prediction in found)
            lines += [_line(ranks, one, bold=one.seconds == fastest) for one in found]
        whole = predict(call, ParallelConfig(), H200).one_rank_seconds
        parts.append(f"{name}; {1e3 * whole:.1f} ms on one rank:\n\n{_table(COLUMNS, lines)}")
    return "\n\n".join(parts)


def _line(ranks: int, found: Prediction, *, bold: bool) -> tuple[str, ...]:
    together = f"{1e3 * found.seconds:.2f}"
    return (
        str(ranks),
        found.degrees,
        f"{found.sent_bytes / 1e6:.0f}",
        f"{1e3 * found.compute_seconds:.2f}",
        f"{1e3 * found.copy_seconds:.2f}",
        f"{1e3 * found.exchange_seconds:.2f}",
        f"{1e3 * found.exposed_seconds:.2f}",
        f"**{together}**" if bold else together,
        f"{found.speedup:.2f}",
        f"{found.efficiency:.2f}",
    )


def backends() -> str:
    """Which mode each backend's facts claim."""
    return _table(("backend", "variant", *MODES), _mode_lines())


def _mode_lines() -> Iterator[tuple[str, ...]]:
    for row in backend_rows(built_in_facts()):
        served = row.kernel.sequence_parallel
        yield row.backend, row.variant or "-", *("yes" if mode in served else "-" for mode in MODES)


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
