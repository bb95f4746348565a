"""What README and CONTRIBUTING show is run: examples work, and the output beside them is what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from omni_attn.cli.app import app
from omni_attn.testing import BackendConformance
from omni_attn.testing.conformance import run_conformance

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Contents of the fenced code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_readme_example_of_a_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(README, "python")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "torch.Size([1, 16, 256])" in printed and "TORCH_SDPA" in printed


def test_readme_shows_what_explain_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pipeline,) = blocks(README, "yaml")
    (tmp_path / "wan.yaml").write_text(pipeline, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command, shown = re.search(
        r"```\n\$ omni-attn (explain[^\n]*)\n(.*?)```", README, flags=re.DOTALL
    ).groups()  # type: ignore[union-attr]
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    assert [line.rstrip() for line in result.stdout.strip().splitlines()] == shown.strip().splitlines()


def test_contributed_backend_conforms() -> None:
    names: dict[str, type] = {}
    backend, conformance = blocks(CONTRIBUTING, "python")
    exec(compile(backend + conformance, "CONTRIBUTING.md", "exec"), names)
    suite = names["TestEinsum"]()
    assert isinstance(suite, BackendConformance)
    outcomes = dict(run_conformance(suite))
    assert len(outcomes) > 15
    torch.compiler.reset()
    assert {name: error for name, error in outcomes.items() if error is not None} == {}
