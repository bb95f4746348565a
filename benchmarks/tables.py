"""Markdown tables, and the rows that candidates of one group make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.rounds import Row

COLUMNS = ("candidate", "ms", "dense / ms", "error", "as exact", "peak MiB", "parts, ms")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its head; pipes in a cell are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def ratio(number: float | None, base: float | None) -> str:
    """number / base, empty where there is none."""
    return "" if number is None or not base else f"{number / base:.2f}"


def base_of(rows: Iterable[Row], kind: str) -> float | None:
    """Milliseconds of the first row of this kind that was timed."""
    return next((row.milliseconds for row in rows if row.kind == kind and row.milliseconds is not None), None)


def row_cells(row: Row, base: float | None) -> list[str]:
    """One candidate under COLUMNS; what was not timed tells why."""
    if row.milliseconds is None:
        return [row.name, "", "", row.problem, "", "", ""]
    return [
        row.name,
        f"{row.milliseconds:.2f}",
        ratio(base, row.milliseconds),
        "" if row.error is None else f"{row.error:.1e}",
        "" if row.as_exact is None else f"{row.as_exact:.4f}",
        "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.0f}",
        ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in row.phases.items()),
    ]


class Report:
    """Text that is printed as it comes, and kept in a file where one is named."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.write_text("", encoding="utf-8")

    def say(self, text: str) -> None:
        """Adds a paragraph."""
        print(f"{text}\n", flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{text}\n\n")
