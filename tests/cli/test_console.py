"""Tables: whole in a pipe, readable in a narrow terminal."""

from __future__ import annotations

import io

import pytest

from omni_attn.cli.console import print_table

COLUMNS = ("role", "backend", "reason")
LONG = "needs a [cuda] device, " * 20
SECTIONS = [[("self", "A", LONG), ("", "B", "")], [("cross", "A", "short")]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", stream)
    print_table(COLUMNS, SECTIONS, details=("reason",))
    monkeypatch.undo()
    return stream.getvalue().splitlines()


def test_a_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(io.StringIO(), monkeypatch)
    assert [line for line in lines if LONG.rstrip() in line and "self" in line and " A " in line]
    assert all(line == line.rstrip() for line in lines)


def test_a_narrow_terminal_gets_details_below_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(Terminal(), monkeypatch)
    assert max(map(len, lines)) <= 60
    row = next(number for number, line in enumerate(lines) if line.startswith("self"))
    assert lines[row].split() == ["self", "A"]
    below = [line.strip() for line in lines[row + 1 :]]
    end = next(number for number, line in enumerate(below) if line == "B")
    assert " ".join(below[:end]) == LONG.strip()
