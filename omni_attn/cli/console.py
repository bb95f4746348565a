"""How commands print: tables that fit a terminal and stay whole in a pipe, JSON, and notes on stderr."""

from __future__ import annotations

import json
import sys
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
}


def console(stream: TextIO | None = None) -> Console:
    """A console on `stream` (standard output); texts are printed as they are, without markup."""
    stream = stream or sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def print_table(
    columns: Sequence[str], sections: Iterable[Iterable[Row]], *, wrap: Sequence[str] = ()
) -> None:
    """Prints a table on standard output.

    Args:
        sections: groups of rows with a line between them.
        wrap: the columns that a narrow terminal may fold; the others keep their width.
    """
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column not in wrap, overflow="fold")
    for section in sections:
        for row in section:
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        table.add_section()
    console().print(table)


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
