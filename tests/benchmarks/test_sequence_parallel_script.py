"""benchmarks/sequence_parallel.py at toy size: alone in this process, and as two processes on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import parallel_packing as packing
from benchmarks import sequence_parallel as script
from benchmarks.parallel_ranks import StillCollectives
from omni_attn.parallel.collectives import Pending, all_gather
from omni_attn.parallel.heads import split_heads
from omni_attn.parallel.outbox import Counts, Outbox, Rows
from omni_attn.parallel.shards import Shards
from omni_attn.parallel.trade import HeadTrade, Traded

SMALL = ["--toy", "--percent", "50", "--rounds", "1", "--pieces", "3"]


def tables(text: str) -> dict[str, list[list[str]]]:
    """Cells of the rows by the line above their table."""
    found: dict[str, list[list[str]]] = {}
    name = ""
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith("|"):
            name = line
        elif line.startswith("|"):
            found.setdefault(name, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return {name: rows[2:] for name, rows in found.items()}


def test_alone(tmp_path: Path) -> None:
    output = tmp_path / "alone.md"
    parts = "dense,vsa,step,packing"
    script.main([*SMALL, "--alone", "--ranks", "2,4", "--parts", parts, "--output", str(output)])
    found = tables(output.read_text(encoding="utf-8"))
    assert len(found) == 7
    for name, rows in found.items():
        assert all(float(row[1]) > 0 for row in rows), (name, rows)
    for name, rows in found.items():
        if name.startswith("Self-attention"):
            assert [row[0] for row in rows] == [
                "one rank",
                "ulysses_degree 2",
                "ulysses_degree 2, 3 pieces",
                "ring_degree 2",
                "allgather_degree 2",
                "ulysses_degree 4",
                "ring_degree 4",
                "ulysses_degree 2 x ring_degree 2",
                "allgather_degree 4",
            ]
        if name.startswith("VSA"):
            assert [row[0] for row in rows] == [
                "one rank",
                "ulysses_degree 2",
                "ulysses_degree 2, 3 pieces",
                "ulysses_degree 4",
            ]


def test_two_processes(tmp_path: Path) -> None:
    output = tmp_path / "two.md"
    script.main([*SMALL, "--ranks", "2", "--parts", "dense,vsa,step", "--output", str(output)])
    text = output.read_text(encoding="utf-8")
    assert "wrong numbers" not in text
    found = tables(text)
    assert len(found) == 5
    for rows in found.values():
        assert all(float(row[1]) > 0 for row in rows)
        assert all(float(row[5]) < 1e-4 for row in rows[1:])  # from one rank


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "2,4"], "needs --alone"),
        (["--parts", "packing"], "packing needs --alone"),
        (["--ranks", "1"], "--ranks starts at 2"),
        (["--pieces", "1"], "--pieces starts at 2"),
        (["--parts", "sparse"], "no such parts: sparse"),
    ],
)
def test_words_that_make_no_run(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(words)
    assert said in capsys.readouterr().err


def test_more_processes_than_gpus() -> None:
    found = torch.cuda.device_count()
    with pytest.raises(SystemExit, match=f"needs as many GPUs, found {found}: --alone predicts from one"):
        script.main(["--ranks", str(max(2, found + 1))])


def test_all_ways_of_packing_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 3, 6, 4, generator=generator) for _ in range(3)]
    expected = packing._by_tensor(tensors, 2)
    assert expected.shape == (2, 3, 1, 3, 12)
    for way in (packing._by_rank_and_tensor, packing._concatenated):
        assert torch.equal(way(tensors, 2).flatten(), expected.flatten())
    words = packing._by_words(tensors, 2).view(torch.float32)
    assert torch.equal(words.flatten(), expected.flatten())
    sent: list[torch.Tensor] = []

    class Noting(StillCollectives):
        def start_all_to_all(self, outbox: Outbox) -> Pending:
            assert isinstance(outbox, Rows)
            sent.append(outbox.rows)
            return outbox.rows

    trade = HeadTrade(Noting(2), split_heads(6, 6, 2, role="self"))
    tokens = Traded(Shards((3, 3)))
    trade.to_heads(tensors[:1], tensors[1:], tokens, tokens)
    assert torch.equal(sent[0], expected.flatten())


def test_what_stands_still_has_the_right_shapes() -> None:
    still, rows = StillCollectives(3), torch.arange(6.0).view(3, 2)
    assert still.start_all_to_all(Rows(rows, Counts((1, 1, 1), (1, 1, 1)))) is rows
    assert still.start_all_to_all(Rows(rows, Counts((1, 1, 1), (2, 2, 1)))).shape == (5, 2)
    assert all_gather(still, rows, (3, 3, 2)).shape == (8, 2)
    assert still.start_all_to_all(Rows(rows[:0], Counts((0, 0, 0), (0, 0, 0)))).shape == (0, 2)
