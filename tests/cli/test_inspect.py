"""`omni-attn inspect`: table, figures and pictures of one call; JSON alone on standard output; errors that help."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.backends.block_summary_layers import blocks_of
from tests.cli.conftest import Cli
from tests.inspection.stubs import TILED
from tests.selection.stubs import registered

Write = Callable[..., Path]
SPARSE = "{per_role: {self: {backend: TILED_TEST, options: {topk: 3}}}}"
ONE_CALL = ("--step", 1, "--layer", 2, "--rounds", 1, "--set", "device=cpu", "--set", "generation.height=96")


@pytest.fixture(autouse=True)
def _tiled() -> Iterator[None]:
    with registered(TILED):
        yield


def test_table_figures_and_pictures(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    result = cli("inspect", pipeline(SPARSE), *ONE_CALL, "-o", "seen")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("layer 2 (self), step 1 of 2 (sigma 0.") and lines[0].endswith("TILED_TEST")
    assert (
        "per_role['self'], route TILED_TEST: SPARSE; cpu, float32; 24 query tokens (grid 2 x 6 x 2)"
        in lines[1]
    )
    assert [line.split()[0] for line in lines[4:8]] == ["0", "1", "2", "3"]
    assert "effective sparsity 0.0 % (token pairs left out); nominal 0.0 %" in result.stdout
    assert "dense: TORCH_SDPA" in result.stdout and "predicted by counting pairs" in result.stdout
    assert "note: times were taken on cpu: they say nothing about a GPU" in result.stdout
    assert "denoising" in result.stderr
    written = {path.name for path in (tmp_path / "seen").iterdir()}
    heads = {f"head_0{head}.png" for head in range(4)}
    assert written == {"inspection.json", "block_maps.png", "mass_kept.png", *heads}
    assert not (tmp_path / "out").exists()


def test_json(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    result = cli("inspect", pipeline(SPARSE), *ONE_CALL, "--set", "generation.width=64", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    files = found.pop("files")
    assert all((tmp_path / file).is_file() for file in files) and len(files) == 7
    assert json.loads((tmp_path / "out" / "inspection.json").read_text(encoding="utf-8")) == found
    assert (found["step"], found["layer"], found["role"]) == (1, 2, "self")
    assert (found["grid"], found["query_tokens"], found["query_tiles"]) == ([2, 6, 4], 48, 6)
    total = found["total"]
    assert total["tiles"] == total["pairs"] == 0.5 == total["effective_sparsity"]  # the grid is whole tiles
    assert 0 < total["least_mass_kept"] <= total["mass_kept"] < 1
    assert len(found["heads"]) == 4 and len(found["mass_kept_by_tile"]) == 4
    by_tile = [share for head in found["mass_kept_by_tile"] for share in head]
    assert sum(by_tile) / len(by_tile) == pytest.approx(total["mass_kept"])
    assert 1e-3 < total["error"] < 1 and total["kernel_error"] < 1e-5 and found["dense_error"] < 1e-5
    speed = found["speed"]
    assert speed["measured"] == speed["dense_ms"] / speed["sparse_ms"]
    assert speed["predicted"] == pytest.approx(48 * 48 / (48 * 24 + 6 * 6 / 2))


def test_the_coarse_term_has_a_column(cli: Cli, pipeline: Write) -> None:
    file = pipeline("{per_role: {self: {backend: TILED_TEST, options: {topk: 1, coarse: true}}}}")
    result = cli("inspect", file, *ONE_CALL)
    assert result.exit_code == 0, result.stderr
    assert "without coarse" in result.stdout
    assert "without coarse" not in cli("inspect", pipeline(SPARSE), *ONE_CALL).stdout


def test_means_that_take_part_have_a_column(cli: Cli, pipeline: Write) -> None:
    file = pipeline("{per_role: {self: {backend: BLOCK_SUMMARY_ATTN, block_sparse: {sparsity: 0.6}}}}")
    with blocks_of(8):
        result = cli("inspect", file, *ONE_CALL)
    assert result.exit_code == 0, result.stderr
    assert "without means" in result.stdout


def test_a_dense_backend_is_refused(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    result = cli("inspect", pipeline(), *ONE_CALL)
    assert (result.exit_code, result.stdout) == (2, "")
    assert 'role "self": TORCH_SDPA (platform default) selects no blocks' in result.stderr
    assert "--set attention.per_role.self.backend=" in result.stderr
    assert not (tmp_path / "out").exists()


def test_refused_roles_come_first(cli: Cli, pipeline: Write) -> None:
    result = cli("inspect", pipeline("{per_role: {self: FLASH_ATTN}}"), *ONE_CALL)
    assert (result.exit_code, result.stdout) == (2, "")
    assert 'role "self": FLASH_ATTN' in result.stderr


def test_a_negative_step_is_a_usage_mistake(cli: Cli, pipeline: Write) -> None:
    result = cli("inspect", pipeline(SPARSE), "--step", -1, "--layer", 0)
    assert result.exit_code == 2 and "Usage" in result.stderr
