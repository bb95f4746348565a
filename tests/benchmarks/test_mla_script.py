"""benchmarks/mla.py at toy size."""

from __future__ import annotations

import pytest

from benchmarks import mla


def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    mla.main(["--toy", "--heads", "2", "--rounds", "1"])
    said = capsys.readouterr().out
    for part in ("decode, 2 heads, 2 requests over 24 tokens", "prefill, 2 heads, 24 tokens"):
        table = said.partition(part)[2].strip().splitlines()[1:]
        assert next(line for line in table if "ours, TORCH_SDPA" in line).rpartition("e-")[0], said
    assert "FlashInfer MLA" in said and "FlashAttention 3" in said
    assert "wrong numbers" not in said
