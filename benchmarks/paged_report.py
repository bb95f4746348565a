"""Tables of calls over a paged cache, and their targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.paged_inputs import PagedCase
from benchmarks.paged_steps import PARTS, HostRow
from benchmarks.rounds import Row
from benchmarks.tables import markdown_table, ratio

HOST_COLUMNS = ("backend", *PARTS)


class Target(NamedTuple):
    """How fast our rows of a kind are to be, those whose names hold `own`, against the fastest peer named `peer`."""

    kind: str
    own: str
    peer: str
    least: float


VIDEO_TARGETS = (Target("default", "", "", 0.97), Target("ours", "TRITON_ATTN", "", 0.75))
DECODE_TARGETS = (Target("ours", "TRITON_ATTN", "FlashInfer", 0.8),)
#: Microseconds of a step of 40 layers in one group; FlashInfer plans on the host, and is reported alone.
HOST_TARGET, HOST_FREE = 60.0, "FLASHINFER"


def call_table(case: PagedCase, rows: Sequence[Row], item_bytes: int) -> str:
    """One line per candidate: time, rate, speed against the fastest peer, error and memory; or why there is none."""
    decode = case.query_len == 1
    header = ("candidate", "ms", "GB/s" if decode else "TFLOP/s", "fastest peer / ms", "error", "peak MiB")
    best = fastest(rows, "peer")
    rate = 1e-6 * item_bytes * case.cache_numbers if decode else 1e-9 * case.flops
    return markdown_table(header, [_cells(row, best, rate) for row in rows])


def _cells(row: Row, best: Row | None, rate: float) -> list[str]:
    if row.milliseconds is None:
        return [row.name, "", "", row.problem, "", ""]
    return [
        row.name,
        f"{row.milliseconds:.3f}",
        f"{rate / row.milliseconds:.4g}",
        ratio(None if best is None else best.milliseconds, row.milliseconds),
        "" if row.error is None else f"{row.error:.1e}",
        "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}",
    ]


def fastest(rows: Iterable[Row], kind: str, name: str = "") -> Row | None:
    """The fastest row of a kind that was timed and whose name holds `name`."""
    timed = [row for row in rows if row.kind == kind and name in row.name and row.milliseconds is not None]
    return min(timed, key=lambda row: row.milliseconds or 0.0, default=None)


def held_calls(rows: Sequence[Row], targets: Iterable[Target]) -> Iterator[str]:
    """A sentence for each target: the factor, and whether it holds."""
    for kind, name, rival, least in targets:
        own, peer = fastest(rows, kind, name), fastest(rows, "peer", rival)
        if own is None or peer is None or own.milliseconds is None or peer.milliseconds is None:
            continue
        factor = peer.milliseconds / own.milliseconds
        yield f"{own.name} is {factor:.3f} times as fast as {peer.name} (target {least}{_missed(factor >= least)})."


def host_cells(row: HostRow) -> list[str]:
    """One backend under HOST_COLUMNS."""
    if row.problem:
        return [row.name, row.problem, *[""] * (len(PARTS) - 1)]
    waits = {} if row.syncs is None else row.syncs
    return [
        row.name,
        *(f"{row.microseconds[part]:.1f}" + (f" ({waits[part]})" if part in waits else "") for part in PARTS),
    ]


def held_host(rows: Iterable[HostRow]) -> Iterator[str]:
    """A sentence for each backend with a target."""
    for row in rows:
        if row.problem or HOST_FREE in row.name:
            continue
        time = row.microseconds["step"]
        waits = sum((row.syncs or {}).values())
        missed = _missed(time <= HOST_TARGET and not waits)
        yield (
            f"{row.name}: a step takes the host {time:.0f} microseconds and waits {waits} times for the device "
            f"(targets {HOST_TARGET:.0f} and 0{missed})."
        )


def _missed(held: bool) -> str:
    return "" if held else ", missed"
