"""benchmarks/h3_block.py and benchmarks/block_summary.py at a size that a CPU runs, and what they judge by."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import block_summary, h3_block
from benchmarks.h3_call import CASES, TOY, Calls, dense_methods, sparse_methods
from benchmarks.rounds import Row, shuffled_rounds
from benchmarks.sampled import SampledRows
from benchmarks.tables import markdown_table
from benchmarks.vsa_inputs import MAPS
from omni_attn.ops.block_sparse.partition import BlockPartition
from tests.benchmarks.h3_sparse_attn_stub import h3_sparse_attn

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def run(main: Callable[[list[str]], None], tmp_path: Path, *words: str) -> tuple[str, dict[str, list[str]]]:
    """The report's file, and the cells of its tables by the name of the row."""
    file = tmp_path / "report.md"
    main(["--toy", "--rounds", "1", "--output", str(file), *words])
    text = file.read_text(encoding="utf-8")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    return text, {cells[0]: cells[1:] for cells in lines}


def test_the_attention_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--parts", "call", "--maps", "random", "--sparsity", "0.9", "--tiles", "4x8x8")
    text, rows = run(h3_block.main, tmp_path, *words, "--variants", "torch,fa3")
    assert "Attention call, 4112 rows, grid 4 x 32 x 32, 2 heads of 16, random maps:" in text
    timed = {name: cells for name, cells in rows.items() if cells[0].replace(".", "").isdigit()}
    assert set(timed) == {
        "dense: TORCH_SDPA",
        "dense, platform default: TORCH_SDPA",
        "VSA 0.9, 4x8x8, gate: FASTVIDEO_VSA (torch)",
        "VSA 0.9, 4x8x8: FASTVIDEO_VSA (torch)",
        "RAINFUSION 0.9: RAINFUSION_ATTN (torch)",
        "BLOCK_SUMMARY 0.9: BLOCK_SUMMARY_ATTN (torch)",
    }
    assert all(float(cells[2]) < 5e-3 for cells in timed.values())
    exact = {name.partition(" ")[0] for name, cells in timed.items() if cells[3] == "1.0000"}
    assert exact == {"VSA", "BLOCK_SUMMARY"}
    assert rows["VSA 0.9, 4x8x8, gate, fa3"][2].startswith("BackendRejectedError: ")
    assert re.search(
        r"^VSA 0.9, 4x8x8.* is [\d.]+ times as fast as dense attention \(target 3.5", text, re.MULTILINE
    )
    assert text.strip() in capsys.readouterr().out.strip()


def test_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(h3_block, "TOY", replace(TOY, grid=(4, 16, 16)))
    words = ("--parts", "block", "--sparsity", "0.9", "--tiles", "4x4x4", "--backends", "FASTVIDEO_VSA")
    text, rows = run(h3_block.main, tmp_path, *words, "--variants", "torch,fa3")
    assert "Block, eager, 1040 rows" in text and "Block, compiled, 1040 rows" in text
    differences = {name: float(cells[3]) for name, cells in rows.items() if cells[0][0].isdigit()}
    assert differences.pop("ours, dense") == differences.pop("ours, dense, platform default") == 0
    assert 0 < differences.pop("diffusers native") < 2e-3
    gated, plain = (differences[f"ours, VSA 0.9, 4x4x4{words}, torch"] for words in (", gate", ""))
    assert 2e-3 < plain < 0.1 and 2e-3 < gated < 0.1
    assert 'ours, VSA 0.9, 4x4x4, gate, fa3: BackendRejectedError: role "self": ' in capsys.readouterr().out


def test_against_the_peer(tmp_path: Path) -> None:
    with h3_sparse_attn() as calls:
        text, rows = run(block_summary.main, tmp_path, "--topk", "4", "--maps", "correlated")
    assert set(calls) == {4}
    assert "correlated maps, 4 of 33 blocks of 128:" in text and "h3-sparse-attn takes " in text
    for name in ("h3-sparse-attn", "ours: BLOCK_SUMMARY_ATTN (torch)"):
        assert float(rows[name][2]) < 5e-3 and rows[name][3] == "1.0000"


def test_a_peer_that_computes_something_else_is_not_timed(tmp_path: Path) -> None:
    with h3_sparse_attn(forgets=True):
        text, rows = run(block_summary.main, tmp_path, "--topk", "4", "--maps", "random")
    assert rows["h3-sparse-attn"][0] == "" and rows["h3-sparse-attn"][2].startswith("wrong numbers: error ")
    assert "times as long as ours" not in text


def test_a_peer_that_is_not_installed_is_named(tmp_path: Path) -> None:
    _, rows = run(block_summary.main, tmp_path, "--topk", "4", "--maps", "random")
    assert rows["h3-sparse-attn"][2] == "ModuleNotFoundError: No module named 'h3_sparse_attn'"
    assert rows["ours: BLOCK_SUMMARY_ATTN (torch)"][3] == "1.0000"


def test_wrong_numbers_of_a_layer_are_seen() -> None:
    calls = Calls.of(TOY, MAPS["random"](TOY, CPU, torch.Generator().manual_seed(0)))
    methods = sparse_methods(0.9, ("FASTVIDEO_VSA",), [(4, 4, 4)], ["torch"])
    dense, gated, plain = calls.candidates([*dense_methods(CPU)[:1], *methods])
    assert calls.check(gated, Row("", "")) < 5e-3
    wrong = {"gate": (plain, gated), "tiles": (dense, plain)}
    for other, right in wrong.values():
        object.__setattr__(right, "call", other.call)
        assert calls.check(right, Row("", "")) > 0.05


def test_cases_have_the_rows_that_are_published() -> None:
    assert [case.tokens for case in CASES.values()] == [37740, 73416, 103996]
    assert [case.grid for case in CASES.values()] == [(37, 24, 42), (72, 24, 42), (102, 24, 42)]


def test_summaries_are_keys_of_the_same_softmax() -> None:
    query, key, value = torch.randn(3, 1, 10, 1, 4, dtype=torch.float64).unbind(0)
    blocks = BlockPartition.in_order(10, 4, CPU)
    chosen = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    chosen[..., 1] = True
    sampled = SampledRows(query, key, value, 0.5)
    rows, _ = sampled.over(chosen, blocks, summaries=True)
    for row in range(10):
        keys = [*key[0, 4:8, 0], key[0, :4, 0].mean(0), key[0, 8:, 0].mean(0)]
        values = [*value[0, 4:8, 0], value[0, :4, 0].mean(0), value[0, 8:, 0].mean(0)]
        counts = torch.tensor([1, 1, 1, 1, 4, 2])
        weights = counts * (torch.stack(keys) @ query[0, row, 0] * 0.5).exp()
        torch.testing.assert_close(rows[0, row, 0], weights / weights.sum() @ torch.stack(values))
    single = BlockPartition.in_order(10, 1, CPU)
    none = torch.zeros(1, 1, 10, 10, dtype=torch.bool)
    torch.testing.assert_close(sampled.over(none, single, summaries=True), sampled.dense)


def test_rounds_hold_everything_in_changing_orders() -> None:
    found = list(shuffled_rounds("abcdef", 4, seed=0))
    orders = [[item for number, item in found if number == wanted] for wanted in range(4)]
    assert all(sorted(order) == list("abcdef") for order in orders)
    assert len({tuple(order) for order in orders}) > 1


def test_tables_escape_what_would_end_a_cell() -> None:
    assert markdown_table(["a", "b"], [["1", "x | y"]]).splitlines() == [
        "| a | b |",
        "| --- | --- |",
        r"| 1 | x \| y |",
    ]


@pytest.mark.parametrize("main", [h3_block.main, block_summary.main])
def test_a_cpu_refuses_the_real_size(main: Callable[[list[str]], None]) -> None:
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU, found none: --toy"):
        main([])


@pytest.mark.parametrize(
    ("main", "words", "text"),
    [
        (h3_block.main, ["--sparsity", "1"], "--sparsity takes numbers between 0 and 1"),
        (h3_block.main, ["--tiles", "4x4"], "--tiles 4x4: needs three positive numbers"),
        (h3_block.main, ["--parts", "blocks"], "no such parts: blocks. Known: call, block"),
        (h3_block.main, ["--backends", "VSA"], "no such backends: VSA. Known: FASTVIDEO_VSA"),
        (block_summary.main, ["--cases", "125-frames"], "no such cases: 125-frames. Known: 124-frames"),
    ],
)
def test_bad_words_are_refused(
    main: Callable[[list[str]], None], words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("topk", [0, 33])
def test_some_blocks_have_to_be_left_out(topk: int) -> None:
    with pytest.raises(SystemExit, match=f"--topk {topk}: toy has 33 blocks"):
        block_summary.main(["--toy", "--topk", str(topk)])
