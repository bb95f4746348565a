"""What benchmarks/vsa.py found, and its table."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.rounds import Row


@dataclass(frozen=True)
class Group:
    """One case, kind of map and share of tiles.

    Attributes:
        overlap: what the lists of tiles that follow each other have in common; mass: what the tiles keep of dense
            attention's weights on the sampled rows; both of exact selection.
    """

    case: str
    grid: tuple[int, int, int]
    tile: tuple[int, int, int]
    heads: int
    maps: str
    percent: float
    topk: int
    tiles: int
    overlap: float
    mass: float
    rows: list[Row]

    def fastest(self, kind: str) -> Row | None:
        """The fastest row of a kind, None without one that was timed."""
        timed = [row for row in self.rows if row.kind == kind and row.milliseconds is not None]
        return min(timed, key=lambda row: row.milliseconds or 0.0, default=None)


def print_group(group: Group) -> None:
    """A table of one group: times, ratios, errors, memory."""
    print(
        f"\n{group.case}, {group.maps} maps, {group.percent:g} %: {group.topk} of {group.tiles} tiles; "
        f"lists that follow each other share {group.overlap:.2f}, attention mass kept {group.mass:.3f}"
    )
    dense, peer = group.fastest("dense"), group.fastest("peer")
    dense_ms = None if dense is None else dense.milliseconds
    peer_ms, peer_bytes = (None, None) if peer is None else (peer.milliseconds, peer.peak_bytes)
    print(
        f"  {'':38} {'ms':>9} {'dense/ms':>9} {'of peer':>8} {'error':>8} {'as exact':>8} {'MiB':>8} {'of peer':>8}"
    )
    for row in group.rows:
        if row.milliseconds is None:
            print(f"  {row.name:38} {row.problem}")
            continue
        cells = (
            f"{row.milliseconds:9.3f}",
            f"{_ratio(dense_ms, row.milliseconds):>9}",
            f"{_ratio(row.milliseconds, peer_ms):>8}",
            f"{row.error:8.1e}",
            f"{'' if row.as_exact is None else format(row.as_exact, '.4f'):>8}",
            f"{'' if row.peak_bytes is None else format(row.peak_bytes / 2**20, '.0f'):>8}",
            f"{_ratio(row.peak_bytes, peer_bytes):>8}",
        )
        phases = ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in row.phases.items())
        print(f"  {row.name:38} {' '.join(cells)}  {phases}".rstrip())


def _ratio(number: float | None, base: float | None) -> str:
    return "" if number is None or not base else f"{number / base:.2f}"
