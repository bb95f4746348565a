"""`omni-attn tune`: a file that runs, says where it was measured, and is told apart from another machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_attn.config import load_pipeline
from tests.cli.conftest import EXAMPLES, Cli
from tests.selection.stubs import registered
from tests.tuning.stubs import QuickBackend, SlowBackend, WrongBackend, pair

Write = Callable[..., Path]
QUICK = ("--device", "cpu", "--rounds", "1")


@pytest.fixture
def tuned(cli: Cli, pipeline: Write, tmp_path: Path) -> Path:
    result = cli("tune", pipeline(), "-o", "tuned.yaml", *QUICK)
    assert result.exit_code == 0, result.stderr
    return tmp_path / "tuned.yaml"


def changed(file: Path, **fields: Any) -> Path:
    """The file as it would be had it been tuned elsewhere."""
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    data["tuned_for"].update(fields)
    other = file.with_name("other.yaml")
    other.write_text(yaml.safe_dump(data), encoding="utf-8")
    return other


def test_table_and_file(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    with registered(pair(SlowBackend), pair(QuickBackend)):
        result = cli("tune", pipeline("{default: SDPA}"), "--output", "tuned.yaml", *QUICK)
        assert result.exit_code == 0, result.stderr
        config = load_pipeline(tmp_path / "tuned.yaml", environ={})
    chosen = [line for line in result.stdout.splitlines() if line.rstrip().endswith("chosen")]
    assert [line.split()[:3] for line in chosen] == [
        ["self", "4", "QUICK_TEST"],
        ["cross", "4", "QUICK_TEST"],
    ]
    assert "refused: needs a cuda device, found cpu" in result.stdout
    assert result.stdout.splitlines()[-1] == "Written: tuned.yaml"
    assert {role: spec.backend for role, spec in config.attention.per_role.items()} == {
        "self": "QUICK_TEST",
        "cross": "QUICK_TEST",
    }
    assert config.attention.default is not None and config.attention.default.backend == "TORCH_SDPA"
    assert "self" in result.stderr and "cross" in result.stderr  # the bars


def test_wrong_numbers_are_told_with_both_errors(cli: Cli, pipeline: Write) -> None:
    with registered(pair(WrongBackend)):
        result = cli("tune", pipeline(), "-o", "tuned.yaml", *QUICK, "--max-error", "0.9")
    assert result.exit_code == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if "WRONG_TEST" in line]
    assert len(rows) == 2
    for row in rows:
        assert row.rstrip().endswith("wrong numbers: error 5.0e-1, documented 2.3e-3")


def test_runs_here_without_a_word(cli: Cli, tuned: Path, tmp_path: Path) -> None:
    result = cli("run", tuned, "--set", "device=cpu")
    assert result.exit_code == 0, result.stderr
    assert "tuned_for" not in result.stderr
    rows = [line for line in result.stdout.splitlines() if "per_role['" in line]
    assert len(rows) == 2 and all("TORCH_SDPA" in row for row in rows)
    assert (tmp_path / "out").is_dir()


def test_run_elsewhere_says_so(cli: Cli, tuned: Path) -> None:
    other = changed(
        tuned, device="NVIDIA H200", capability="sm_90", torch="2.0.0", packages={"fa3-fwd": "0.0.3"}
    )
    result = cli("run", other, "--set", "device=cpu")
    assert result.exit_code == 0, result.stderr
    note = next(line for line in result.stderr.splitlines() if "tuned_for" in line)
    assert note.startswith(
        "warning: tuned_for: measured under other conditions: device NVIDIA H200 (sm_90) then"
    )
    assert "torch 2.0.0 then" in note and "fa3-fwd 0.0.3 then, not installed here" in note
    assert "`omni-attn tune` measures anew" in note


def test_other_sizes_say_so(cli: Cli, tuned: Path) -> None:
    result = cli("explain", tuned, "--set", "device=cpu", "--set", "generation.height=64")
    assert result.exit_code == 0
    assert 'role "self" 8 x 8 tokens then, 16 x 16 here' in result.stderr
    assert "device" not in result.stderr


def test_a_refused_choice_is_explained_by_the_note_before_it(cli: Cli, tuned: Path) -> None:
    other = changed(tuned, device="NVIDIA H200", capability="sm_90")
    result = cli("run", other, "--set", "device=cpu", "--set", "attention.per_role.self.backend=FLASH_ATTN")
    assert result.exit_code == 2
    assert result.stderr.index("tuned_for: measured") < result.stderr.index('role "self": FLASH_ATTN')


def test_explain_and_check_say_so(cli: Cli, tuned: Path) -> None:
    result = cli("explain", tuned, "--assume", "sm_90", "--json")
    assert "tuned_for: measured under other conditions: device" in result.stderr
    (note,) = json.loads(result.stdout)["notes"]
    assert "sm_90 here" in note and note in result.stderr
    assert cli("check", tuned).stderr == ""  # without --model no machine is spoken about
    checked = cli("check", tuned, "--model", "--assume", "sm_90")
    assert checked.exit_code == 0
    assert f"{tuned}: tuned_for: measured" in checked.stderr and "good" in checked.stdout


def test_nothing_is_overwritten(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    old = tmp_path / "tuned.yaml"
    old.write_text("mine", encoding="utf-8")
    refused = cli("tune", pipeline(), "-o", old, *QUICK)
    assert refused.exit_code == 2 and "exists already" in refused.stderr
    assert old.read_text(encoding="utf-8") == "mine"
    assert cli("tune", pipeline(), "-o", old, "--force", *QUICK).exit_code == 0
    assert "tuned_for:" in old.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--max-error", "0"), "--max-error 0: needs a positive number"),
        (("--max-error", "nan"), "needs a positive number"),
        (("--max-error", "1e-12"), "no backend here runs it within --max-error 1e-12"),
        (("--device", "tpu"), "device: 'tpu'"),
        (("-o", "no/such/folder.yaml"), "does not exist"),
    ],
)
def test_mistakes_exit_2(
    cli: Cli, pipeline: Write, tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    usual = {"-o": "tuned.yaml", "--device": "cpu", "--rounds": "1"}
    given = {**usual, arguments[0]: arguments[1]}
    result = cli("tune", pipeline(), *(word for pair in given.items() for word in pair))
    assert result.exit_code == 2
    assert text in result.stderr
    assert not (tmp_path / "tuned.yaml").exists()


def test_the_environment_has_no_part_in_it(
    cli: Cli, pipeline: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_ATTN_BACKEND", "CUDNN_ATTN")
    assert cli("tune", pipeline(), "-o", "tuned.yaml", *QUICK).exit_code == 0
    assert load_pipeline(tmp_path / "tuned.yaml", environ={}).attention.default is None


def test_a_folder_is_no_pipeline(cli: Cli, tmp_path: Path) -> None:
    result = cli("tune", tmp_path, "-o", "tuned.yaml", *QUICK)
    assert (result.exit_code, result.stderr) == (2, f"{tmp_path}: is a folder; name a file\n")


@pytest.mark.parametrize("example", ["wan_tiny.yaml", "two_roles.yaml"])
def test_examples(cli: Cli, example: str, tmp_path: Path) -> None:
    result = cli("tune", EXAMPLES / example, "-o", "tuned.yaml", *QUICK)
    assert result.exit_code == 0, result.stderr
    text, original = (
        (folder / name).read_text(encoding="utf-8")
        for folder, name in ((tmp_path, "tuned.yaml"), (EXAMPLES, example))
    )
    assert "could not be kept" not in text
    missing = [line for line in original.splitlines() if line.strip() and line not in text]
    assert missing == []
