"""benchmarks/exchange_rates.py at toy size, as two processes on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import exchange_rates as script
from omni_attn.parallel import Parallel
from omni_attn.parallel.collectives import Pending
from omni_attn.parallel.outbox import Rows
from omni_attn.testing import fake_ranks
from tests.parallel.counted import PassedOn


def test_two_processes(tmp_path: Path) -> None:
    output = tmp_path / "rates.md"
    words = ["--toy", "--rounds", "1", "--beside", "1,2", "--output", str(output)]
    script.main(words)
    rows = [
        line.strip("| ").split(" | ")
        for line in output.read_text(encoding="utf-8").splitlines()
        if line[:2] == "| "
    ]
    assert [row[0] for row in rows[2:]] == [
        "gloo, one exchange",
        "attention, 3 heads",
        "gloo, 1 exchanges",
        "attention beside 1 of gloo",
        "gloo, 2 exchanges",
        "attention beside 2 of gloo",
    ]
    assert all(float(row[1]) > 0 for row in rows[2:])


def test_all_are_under_way_before_the_kernel() -> None:
    def work(parallel: Parallel) -> list[str]:
        log: list[str] = []

        class Logged(PassedOn):
            def start_all_to_all(self, outbox: Rows) -> Pending:
                log.append(f"start {outbox.counts.send}")
                return self.inner.start_all_to_all(outbox)

            def wait(self, pending: Pending) -> torch.Tensor:
                log.append("wait")
                return self.inner.wait(pending)

        exchanges = script.Exchanges(Logged(parallel.everyone), torch.ones(12), count=2)  # type: ignore[arg-type]
        assert exchanges(lambda: log.append("kernel")).shape == (12,)
        assert exchanges.bytes == 2 * 6 * 4
        return log

    assert fake_ranks({"ulysses_degree": 2}, work) == [["start [6, 6]"] * 2 + ["kernel"] + ["wait"] * 2] * 2


@pytest.mark.parametrize("words", [["--ranks", "1"], ["--beside", "0"], ["--channels", "many"]])
def test_bad_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([*words, "--toy"])
    assert "--" in capsys.readouterr().err
