"""How the tests call the command: in this process, with the texts of both streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from omni_attn.cli import app

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

Cli = Callable[..., Result]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """`cli("explain", file, "--json")`; runs in an empty folder without variables that choose a backend."""
    for variable in ("OMNI_ATTN_BACKEND", "DIFFUSION_ATTENTION_BACKEND"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()

    def call(*arguments: object) -> Result:
        result = runner.invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a small pipeline file with the given attention section; the path."""

    def write(attention: str = "{}", name: str = "pipe.yaml") -> Path:
        file = tmp_path / name
        file.write_text(
            "pipeline: wan\nmodel: wan-tiny\n"
            "generation: {height: 32, width: 32, num_frames: 5, num_inference_steps: 2}\n"
            f"output: out\nattention: {attention}\n",
            encoding="utf-8",
        )
        return file

    return write
