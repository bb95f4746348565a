"""What benchmarks/dense.py prints of a measurement: every backend, the ratios, and whether the targets hold."""

from __future__ import annotations

import pytest

from benchmarks.dense import main, print_ratios, print_shape
from omni_attn.tuning.bench import bench
from omni_attn.tuning.candidates import specs_named
from omni_attn.tuning.shapes import SHAPES
from tests.selection.stubs import registered
from tests.tuning.stubs import CPU, QuickBackend, cpu, pair


def test_a_missed_target_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with registered(pair(QuickBackend)):
        specs = specs_named(["TORCH_SDPA", "QUICK_TEST", "CUDNN_ATTN"], cpu())
        found = list(bench([SHAPES["tiny"]], cpu(), CPU, "float32", specs=specs, rounds=1))
    print_shape(found[0])
    print_ratios(found)
    printed = capsys.readouterr().out
    assert "TORCH_SDPA" in printed and "CUDNN_ATTN                   refused: needs a cuda" in printed
    ratio, mean = printed.splitlines()[-2:]
    assert "(target 0.95, missed)  TORCH_SDPA against QUICK_TEST" in ratio
    assert mean.split()[0] == "mean" and "(target 0.97, missed)" in mean


def test_a_held_target(capsys: pytest.CaptureFixture[str]) -> None:
    specs = specs_named(["TORCH_SDPA"], cpu())
    print_ratios(list(bench([SHAPES["tiny"]], cpu(), CPU, "float32", specs=specs, rounds=1)))
    assert "1.000 (target 0.95)  TORCH_SDPA against TORCH_SDPA" in capsys.readouterr().out


def test_it_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["dense"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU, found none"):
        main()
