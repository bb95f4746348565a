"""The frame of the command: help without torch, exit codes, one text for a mistake."""

from __future__ import annotations

import subprocess
import sys

import pytest

from omni_attn import __version__
from tests.cli.conftest import Cli

COMMANDS = ("run", "explain", "doctor", "check", "backends", "schema", "bench", "tune", "inspect")


def test_help_names_every_command(cli: Cli) -> None:
    result = cli("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f" {command} " in result.stdout


def test_help_imports_no_torch() -> None:
    calls = [["--help"], *([command, "--help"] for command in COMMANDS)]
    script = (
        "import sys, io, contextlib\n"
        "from omni_attn.cli import app\n"
        f"for arguments in {calls!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        app(arguments, standalone_mode=False)\n"
        "    assert 'Usage' in out.getvalue(), arguments\n"
        "    loaded = {'torch', 'diffusers', 'omni_attn.config'} & set(sys.modules)\n"
        "    assert not loaded, (arguments, loaded)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omni_attn", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "omni-attn" in done.stdout


@pytest.mark.parametrize("arguments", [("nope",), ("explain",), ("explain", "--nope", "x.yaml"), ("check",)])
def test_usage_mistakes_exit_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage" in result.stderr


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("run", ()),
        ("explain", ()),
        ("check", ()),
        ("tune", ("-o", "out.yaml")),
        ("inspect", ("--step", "0", "--layer", "0")),
    ],
)
def test_missing_file_is_one_line(cli: Cli, command: str, more: tuple[str, ...]) -> None:
    result = cli(command, "nowhere.yaml", *more)
    assert result.exit_code == 2
    assert result.stderr == "nowhere.yaml: there is no such file\n"


def test_mistake_shows_no_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "omni_attn", "run", "nowhere.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "nowhere.yaml: there is no such file\n")


def test_version(cli: Cli) -> None:
    result = cli("--version")
    assert result.exit_code == 0 and result.stdout.strip() == f"omni-attn {__version__}"
