"""`omni-attn run`: from a pipeline file to latents, a picture and the table of what ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.backends.rainfusion_layers import blocks_of
from tests.cli.conftest import EXAMPLES, Cli

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def small() -> tuple[str, ...]:
    """Overrides that make an example run in a second."""
    values = ("height=32", "width=32", "num_frames=5", "num_inference_steps=2")
    return tuple(word for value in values for word in ("--set", f"generation.{value}"))


def test_the_tiny_example(cli: Cli, small: tuple[str, ...], tmp_path: Path) -> None:
    result = cli("run", EXAMPLES / "wan_tiny.yaml", *small, "--set", "device=cpu")
    assert result.exit_code == 0, result.stderr
    table = {line.split()[0]: line for line in result.stdout.splitlines() if "platform default" in line}
    assert list(table) == ["self", "cross"]
    assert all("TORCH_SDPA" in line for line in table.values())
    folder = tmp_path / "outputs" / "wan_tiny"
    assert "outputs/wan_tiny" in result.stdout
    written = {path.suffix for path in folder.iterdir()}
    assert {".safetensors", ".png"} <= written
    assert all(path.name in result.stdout for path in folder.iterdir())
    assert "denoising" in result.stderr
    assert "note: " in result.stdout  # the weights are seeded


def test_the_sparse_example(cli: Cli, tmp_path: Path) -> None:
    size = ("height=128", "width=128", "num_frames=13")  # 4 x 8 x 8 tokens: four tiles, one of them kept
    small = (word for value in size for word in ("--set", f"generation.{value}"))
    result = cli("run", EXAMPLES / "fastwan_vsa.yaml", *small, "--set", "device=cpu")
    assert result.exit_code == 0, result.stderr
    (row,) = (line for line in result.stdout.splitlines() if "per_role['self']" in line)
    assert "FASTVIDEO_VSA" in row and "1 of 4 tiles" in row and row.rstrip().endswith("VSA")
    assert "note: steps: timesteps 1000, 757, 522" in result.stdout
    assert "note: gates" not in result.stdout  # they are read
    assert (tmp_path / "outputs" / "fastwan_vsa" / "latents.safetensors").is_file()


H3_VSA = (
    "model=fasth3-tiny",
    "attention.per_role.self={backend: FASTVIDEO_VSA, fastvideo_vsa: {sparsity: 0.8}}",
)


@pytest.mark.parametrize(("sets", "shown"), [((), "TORCH_SDPA"), (H3_VSA, "1 of 4 tiles, beside 104 tokens")])
def test_video_and_sound_of_the_joint_example(
    cli: Cli, tmp_path: Path, sets: tuple[str, ...], shown: str
) -> None:
    size = ("generation.height=128", "generation.width=192", "generation.num_frames=22", "device=cpu")
    options = (word for value in (*size, *sets) for word in ("--set", value))
    result = cli("run", EXAMPLES / "minimax_h3_tiny.yaml", *options)
    assert result.exit_code == 0, result.stderr
    rows = {
        line.split()[0]: line
        for line in result.stdout.splitlines()
        if line.split()[1:2] in (["self"], ["text"])
    }
    assert list(rows) == ["minimax_h3.token_refiner", "self"]
    assert shown in rows["self"] and "TORCH_SDPA" in rows["minimax_h3.token_refiner"]
    assert "denoising" in result.stderr
    written = {path.name for path in (tmp_path / "outputs" / "minimax_h3_tiny").iterdir()}
    assert written == {"latents.safetensors", "audio_latents.safetensors", "contact_sheet.png"}


def test_a_fallback_shows_its_reason(cli: Cli, small: tuple[str, ...]) -> None:
    result = cli("run", EXAMPLES / "two_roles.yaml", *small, "--set", "device=cpu")
    assert result.exit_code == 0, result.stderr
    (row,) = (line for line in result.stdout.splitlines() if "per_role['self']" in line)
    assert "TORCH_SDPA" in row
    assert "FLASH_ATTN: needs a cuda device" in row


def test_dense_and_sparse_steps_are_both_shown(cli: Cli, small: tuple[str, ...]) -> None:
    """The last step alone would read as if the whole run had been dense."""
    options = "{backend: RAINFUSION_ATTN, block_sparse: {end_step: 1}}"
    with blocks_of(16):
        done = cli("run", EXAMPLES / "wan_tiny.yaml", *small, "--set", f"attention.per_role.self={options}")
    assert done.exit_code == 0, done.stderr
    assert "RAINFUSION_ATTN (torch): RAINFUSION 1 time, RAINFUSION_ATTN (torch): SDPA 1 time" in done.stdout


def test_refused_roles_come_before_anything_is_built(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    file = pipeline("{per_role: {self: FLASH_ATTN, cross: CUDNN_ATTN}}")
    result = cli("run", file, "--set", "device=cpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert 'role "self": FLASH_ATTN' in result.stderr
    assert 'role "cross": CUDNN_ATTN' in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_role_without_a_layer_is_a_warning(cli: Cli, pipeline: Write) -> None:
    result = cli("run", pipeline("{per_role: {corss: TORCH_SDPA}}"), "--set", "device=cpu")
    assert result.exit_code == 0, result.stderr
    assert "warning: attention.per_role.corss: " in result.stderr
    assert "Did you mean 'cross'?" in result.stderr
