"""benchmarks/h3_rows.py at a size that a CPU runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import h3_rows


def test_a_toy_run_judges_and_times_each_pass(tmp_path: Path) -> None:
    h3_rows.main(["--toy", "--rounds", "1", "--output", str(tmp_path / "table.md")])
    lines = (tmp_path / "table.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["norm and modulation", "gated sum", "norm and rotation", "SwiGLU"]
    for row in rows:
        assert float(row[1]) > 0 and 0 < float(row[5]) < 1e-2 and float(row[5]) == float(row[6])


def test_a_cpu_refuses_the_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels it would compare torch with itself."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU, found none: --toy"):
        h3_rows.main([])
