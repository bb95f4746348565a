"""How commands print: tables that fit a terminal and stay whole in a pipe, JSON, and notes on stderr."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")
Row = Sequence[str]

# Wide enough that no cell of a table that goes to a file or a pipe is ever wrapped.
PIPE_WIDTH = 100_000

STYLES = {
    "selected": "bold green",
    "usable": "green",
    "accepted": "green",
    "rejected": "red",
    "refused": "bold red",
    "not usable": "red",
    "right": "green",
    "wrong": "bold red",
    "failed": "bold red",
}


def console(stream: TextIO | None = None) -> Console:
    """A console on `stream` (standard output); texts are printed as they are, without markup."""
    stream = stream or sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def print_table(
    columns: Sequence[str], sections: Iterable[Iterable[Row]], *, details: Sequence[str] = ()
) -> None:
    """Prints a table on standard output; every cell is printed whole.

    Args:
        sections: groups of rows with a line between them.
        details: the columns that move below their row where a terminal is too narrow for the whole table.
    """
    out = console()
    groups = [[tuple(row) for row in section] for section in sections]
    table = _table(columns, groups)
    if out.measure(table, options=out.options.update(max_width=PIPE_WIDTH)).maximum > out.width:
        _print_narrow(out, columns, groups, details)
        return
    with out.capture() as captured:
        out.print(table)
    lines = captured.get().splitlines()
    out.file.writelines(f"{line if out.is_terminal else line.rstrip()}\n" for line in [*lines, ""])


def _table(columns: Sequence[str], groups: Sequence[Sequence[Row]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="fold")
    for rows in groups:
        for row in rows:
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        table.add_section()
    return table


def _print_narrow(
    out: Console, columns: Sequence[str], groups: Sequence[Sequence[Row]], details: Sequence[str]
) -> None:
    """Rows of the short columns, each with its details in wrapped lines below."""
    short = [index for index, column in enumerate(columns) if column not in details]
    widths = [
        max(len(row[index]) for row in [columns, *(r for rows in groups for r in rows)]) for index in short
    ]

    def line(row: Row, head: str = "") -> Text:
        cells = zip((row[index] for index in short), widths, strict=True)
        return Text("  ").join(
            Text(cell.ljust(width), style=head or STYLES.get(cell, "")) for cell, width in cells
        )

    out.print(line(columns, "bold"), soft_wrap=True)
    for rows in groups:
        for row in rows:
            out.print(line(row), soft_wrap=True)
            named = [
                (column, cell)
                for column, cell in zip(columns, row, strict=True)
                if column in details and cell
            ]
            texts = [cell if len(details) == 1 else f"{column}: {cell}" for column, cell in named]
            for text in texts:
                out.print(
                    textwrap.indent(textwrap.fill(text, max(20, out.width - 4)), "    "), soft_wrap=True
                )
        out.print()


def print_line(text: str = "", *, style: str = "") -> None:
    """Prints one line on standard output, never cut by us."""
    console().print(Text(text, style=style), soft_wrap=True)


def print_json(data: object) -> None:
    """Prints plain data as JSON on standard output."""
    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))


def warn(text: str) -> None:
    """Prints a warning on stderr."""
    typer.secho(f"warning: {text}", err=True, fg=typer.colors.YELLOW)


def progress(iterable: Iterable[Item], total: int, description: str) -> Iterator[Item]:
    """Yields the items of `iterable` while a bar on stderr shows how many of `total` are done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as bars:
        yield from bars.track(iterable, total=total, description=description)
