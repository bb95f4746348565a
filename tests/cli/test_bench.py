"""`omni-attn bench`: a table for people, nothing but JSON with --json, and every backend accounted for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_attn.backends.registry import registered_names
from tests.cli.conftest import Cli
from tests.selection.stubs import registered
from tests.tuning.stubs import CoarseBackend, CrashingBackend, WrongBackend, pair

QUICK = ("--device", "cpu", "--rounds", "1")


def test_table(cli: Cli) -> None:
    with registered(pair(CoarseBackend), pair(CrashingBackend), pair(WrongBackend)):
        result = cli("bench", *QUICK, "--shapes", "tiny")
    assert result.exit_code == 0, result.stderr
    machine, how, head, _, *rows = result.stdout.splitlines()
    assert "float32" in machine and "torch " in machine
    assert how == "1 round; wall clock, the fastest of a few calls, caches warm"
    assert head.split() == ["shape", "backend", "ms", "TFLOP/s", "error", "peak", "MiB", "note"]
    notes = {row.removeprefix("tiny").split()[0]: row for row in rows if row.strip()}
    assert set(registered_names()) < set(notes)
    assert "default, 1.000 of the fastest exact one" in notes["TORCH_SDPA"]
    assert "quantised" in notes["COARSE_TEST"] and "2.00e-02" in notes["COARSE_TEST"]
    assert "failed: RuntimeError: illegal memory access" in notes["CRASHING_TEST"]
    assert notes["WRONG_TEST"].rstrip().endswith("wrong numbers: error 5.0e-1, documented 2.3e-3")
    assert "refused: needs a cuda device, found cpu" in notes["CUDNN_ATTN"]
    assert "tiny" in result.stderr  # the bar


def test_json_is_all_of_stdout(cli: Cli) -> None:
    result = cli("bench", *QUICK, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert (data["dtype"], data["rounds"]) == ("float32", 1)
    assert [shape["name"] for shape in data["shapes"]] == ["tiny", "tiny-cross", "tiny-padded"]
    for shape in data["shapes"]:
        assert (shape["default"], shape["best"], shape["default_ratio"]) == ("TORCH_SDPA", "TORCH_SDPA", 1.0)
        found = {entry["backend"]: entry for entry in shape["results"]}
        assert set(found) == set(registered_names())
        sdpa = found["TORCH_SDPA"]
        assert sdpa["status"] == "measured" and sdpa["milliseconds"] == sdpa["rounds"][0] > 0
        assert sdpa["error"] < 1e-6 and sdpa["peak_bytes"] is None
        assert found["CUDNN_ATTN"]["status"] == "refused" and found["CUDNN_ATTN"]["milliseconds"] is None


def test_chosen_backends_and_dtype(cli: Cli) -> None:
    result = cli(
        "bench", *QUICK, "--shapes", "tiny,tiny-cross", "--backends", "sdpa", "--dtype", "bfloat16", "--json"
    )
    data = json.loads(result.stdout)
    assert data["dtype"] == "bfloat16"
    for shape in data["shapes"]:
        (entry,) = shape["results"]
        assert entry["backend"] == "TORCH_SDPA" and 1e-4 < entry["error"] < 1e-2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--shapes", "tinny"), "'tinny' is not a named shape. Did you mean tiny?"),
        (("--shapes", " , "), "--shapes ' , ': names nothing"),
        (("--backends", "SDPAA"), "unknown attention backend 'SDPAA'"),
        (("--backends", "FLASH_ATTN:fa9"), "FLASH_ATTN has no variant 'fa9'"),
        (("--backends", "FLASH_ATTN:fa3"), "nothing was measured"),
        (("--device", "gpu"), "Did you mean 'cuda'?"),
        (("--dtype", "bf16"), "dtype: 'bf16'"),
        (("--plot", "chart.jpeg"), "charts are written as .png"),
        (("--shapes", "wan-14b-720p", "--device", "cpu"), "more than 5 minutes is not started"),
    ],
)
def test_mistakes_exit_2(cli: Cli, arguments: tuple[str, ...], text: str) -> None:
    device = () if "--device" in arguments else ("--device", "cpu")
    result = cli("bench", "--rounds", "1", *device, *arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_rounds_are_at_least_one(cli: Cli) -> None:
    assert cli("bench", "--rounds", "0").exit_code == 2


def test_several_rounds_alternate(cli: Cli) -> None:
    result = cli("bench", "--device", "cpu", "--rounds", "2", "--shapes", "tiny", "--backends", "sdpa")
    assert result.stdout.splitlines()[1].startswith("2 alternating rounds, medians; wall clock")


def test_list_of_shapes(cli: Cli) -> None:
    result = cli("bench", "--shapes", "list")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "118840 keys kept" in rows["hunyuanvideo-720p-padded"]
    assert "75600 x 75600 tokens" in rows["wan-14b-720p"]


def test_plot(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the viz extra: pip install matplotlib")
    result = cli("bench", *QUICK, "--shapes", "tiny", "--plot", "chart.png")
    assert result.exit_code == 0, result.stderr
    assert "Written: chart.png" in result.stdout
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    quiet = cli("bench", *QUICK, "--shapes", "tiny", "--plot", "chart.svg", "--json")
    json.loads(quiet.stdout)
    assert "<svg" in (tmp_path / "chart.svg").read_text(encoding="utf-8")


def test_no_chart_of_nothing(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_attn.tuning.plot.check_plot_path", lambda path: None)
    monkeypatch.setattr("omni_attn.tuning.plot.write_plot", lambda path, found, title: path.touch())
    arguments = ("bench", *QUICK, "--shapes", "tiny", "--plot", "chart.png", "--backends")
    result = cli(*arguments, "CUDNN_ATTN")
    assert result.exit_code == 2
    assert "nothing was measured" in result.stderr and "chart.png was not written" in result.stderr
    assert "Written" not in result.stdout and not (tmp_path / "chart.png").exists()
    assert "Written: chart.png" in cli(*arguments, "CUDNN_ATTN,TORCH_SDPA").stdout
    assert (tmp_path / "chart.png").exists()
