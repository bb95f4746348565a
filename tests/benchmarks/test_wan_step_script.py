"""benchmarks/wan_step.py and what it shares with wan_forward.py, on the tiny preset."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks import wan_step
from benchmarks.wan_forward import print_ratio
from benchmarks.wan_models import Workload, peer_forward, save_gates, save_weights
from benchmarks.wan_step import DENSE, print_rows, run, sparse_specs
from omni_attn.models.checkpoint import read_safetensors

CPU = torch.device("cpu")


def tiny(folder: Path) -> Workload:
    return Workload(
        "wan-tiny",
        folder / "weights",
        CPU,
        dtype=torch.float32,
        latents=(2, 8, 8),
        text_tokens=4,
        backend="eager",
    )


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(no_gates=False, no_compile=False, rounds=1)
    rows = run(tiny(tmp_path), sparse_specs(50.0, "torch", tiles=((1, 2, 2),)), arguments)
    print_rows(rows)
    print_ratio([row for row in rows if row.compiled])
    names = {(row.name, row.compiled) for row in rows}
    sparse = ("ours 50 % of 1x2x2", "ours 50 % of 1x2x2, gates")
    for compiled in (False, True):
        assert {(name, compiled) for name in ("diffusers native", DENSE, *sparse)} <= names
    assert all(row.milliseconds > 0 for row in rows)
    for row in rows:
        assert (1e-4 < row.difference < 1) if row.name in sparse else row.difference < 1e-4
    plain, gated = ({row.difference for row in rows if row.name == name} for name in sparse)
    assert not plain & gated
    printed = capsys.readouterr().out
    assert "eager\n" in printed and "compiled\n" in printed
    assert "times as fast as our dense default" in printed and "of diffusers' best" in printed


def test_diffusers_keeps_its_own_default(tmp_path: Path) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before = _AttentionBackendRegistry.get_active_backend()
    work = tiny(tmp_path)
    save_weights(work)
    with pytest.raises(RuntimeError, match="No viable backend"):  # so the model does take what it is given
        peer_forward(work, "_native_cudnn")()
    assert _AttentionBackendRegistry.get_active_backend() == before


def test_a_candidate_that_cannot_be_built_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = argparse.Namespace(no_gates=True, no_compile=True, rounds=1)
    rows = run(tiny(tmp_path), {"foreign": {"backend": "CUDNN_ATTN"}}, arguments)
    assert "ours foreign" not in [row.name for row in rows]
    assert 'ours foreign: role "self"' in capsys.readouterr().out


def test_specs_are_what_a_person_writes() -> None:
    specs = sparse_specs(10.0, "triton")
    assert list(specs) == ["10 % of 4x4x4", "10 % of 4x8x8"]
    assert specs["10 % of 4x8x8"] == {
        "backend": "FASTVIDEO_VSA",
        "fastvideo_vsa": {"sparsity": 0.9, "tile_size": [4, 8, 8]},
        "variant": "triton",
    }


def test_gates_stand_beside_the_same_weights(tmp_path: Path) -> None:
    work = tiny(tmp_path)
    save_weights(work)
    save_gates(work, tmp_path / "gated")
    plain = read_safetensors(work.folder, "diffusion_pytorch_model")
    gated = read_safetensors(tmp_path / "gated", "diffusion_pytorch_model")
    assert all(gated[name].equal(tensor) for name, tensor in plain.items())
    added = sorted(set(gated) - set(plain))
    assert len(added) == 2 * work.config.num_layers
    assert added[0] == "blocks.0.to_gate_compress.bias"
    assert gated["blocks.0.to_gate_compress.weight"].shape == (work.config.dim, work.config.dim)


def test_it_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["wan_step"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU, found none"):
        wan_step.main()
