"""`torchrun ... -m omni_attn run`: what two processes write and print is what one does, and one mistake is one error.

Each test starts processes, which takes several seconds; all that a single process can show is in test_parallel.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import ROOT, Cli

Write = Callable[..., Path]


def two_processes(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`omni-attn run` on the CPU, started twice by torchrun, in the folder of the file."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*launcher, "-m", "omni_attn", "run", str(file), *sets("device=cpu", *options)],
        cwd=file.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


def test_two_processes_write_what_one_writes(cli: Cli, pipeline: Write, tmp_path: Path) -> None:
    size = ("generation.height=48", "generation.width=80", "generation.num_frames=5")  # 2 x 3 x 5 tokens
    done = two_processes(pipeline(), *size, "parallel.ulysses_degree=2", "output=two")
    assert done.returncode == 0, done.stderr
    alone = cli("run", pipeline(), *sets(*size, "device=cpu", "output=one"))
    assert alone.exit_code == 0, alone.stderr
    one, two = ({path.name for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    latents = [load_file(tmp_path / name / "latents.safetensors")["latents"] for name in ("one", "two")]
    torch.testing.assert_close(*latents, atol=1e-5, rtol=0)
    for text in ("Attention on cpu, float32", "Written into two:", "note: weights: seeded"):
        assert done.stdout.count(text) == 1, done.stdout
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("self"))
    assert "2 ranks" in row
    assert done.stderr.count("denoising") == alone.stderr.count("denoising")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("attention.per_role.self=FLASH_ATTN", 'role "self": FLASH_ATTN (from'),  # every process refuses it
        ("output=pipe.yaml", "output: 'pipe.yaml' cannot be a folder here"),  # the one that writes finds out
    ],
)
def test_a_mistake_is_told_once_and_ends_all(pipeline: Write, option: str, told: str) -> None:
    failed = two_processes(pipeline(), "parallel.ulysses_degree=2", option)
    assert failed.returncode != 0 and failed.stdout == ""
    assert failed.stderr.count(told) == 1, failed.stderr
    assert "exitcode  : 2" in failed.stderr
    assert "Traceback" not in failed.stderr.partition("torch/distributed/elastic")[0]
