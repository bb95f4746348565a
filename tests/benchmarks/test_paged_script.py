"""benchmarks/paged.py at a size that a CPU runs: pages, peers' calls, host time, tables and targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.paged import main
from benchmarks.paged_graph import GraphRow, graph_cells, graph_rows, held_graph
from benchmarks.paged_inputs import (
    ORDERS,
    TOY_CHUNK,
    TOY_DECODE,
    PagedCase,
    PagedInputs,
    decode_case,
    video_case,
)
from benchmarks.paged_report import (
    DECODE_TARGETS,
    VIDEO_TARGETS,
    call_table,
    held_calls,
    held_host,
    host_cells,
)
from benchmarks.paged_steps import PARTS, HostRow
from benchmarks.rounds import Row
from omni_attn.kv_cache import AttentionCGSupport
from tests.benchmarks.paged_stub import paged_peers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def run(tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "found.json"
    main(["--toy", "--rounds", "2", "--json", str(file), "--output", str(tmp_path / "table.md"), *words])
    parts: dict[str, Any] = json.loads(file.read_text())["parts"]
    return parts


def test_calls_beside_peers(tmp_path: Path) -> None:
    with paged_peers() as calls:
        parts = run(tmp_path, "--parts", "chunk,decode", "--backends", "TORCH_SDPA,TRITON_ATTN:split")
    assert set(parts) == {"toy-chunk", "toy-decode"}
    for rows in parts.values():
        by_name = {row["name"]: row for row in rows}
        assert "cannot run on cpu" in by_name.pop("ours, TRITON_ATTN:split")["problem"]
        assert all(
            row["problem"] == "" and row["error"] < 1e-5 and row["milliseconds"] for row in by_name.values()
        )
        assert "ours, TORCH_SDPA, with its write" in by_name
    kinds = {"peer", "ours", "ours, written", "absent"}
    assert {row["kind"] for row in parts["toy-chunk"]} == kinds | {"dense"}
    assert {row["kind"] for row in parts["toy-decode"]} == kinds
    assert set(calls) == {
        "fa3",
        "fa4",
        "flashinfer {'backend': 'fa3'}",
        "flashinfer {'backend': 'fa2'}",
        "flashinfer {'use_tensor_cores': True}",
        "flashinfer {'use_tensor_cores': False}",
    }
    table = (tmp_path / "table.md").read_text()
    assert "toy-chunk: 1 x 24 new tokens over 48 earlier ones, 2 heads of 16, pages of 8, shuffled:" in table
    assert "fastest peer / ms" in table and "target" not in table


def test_a_peer_with_wrong_numbers_is_not_timed(tmp_path: Path) -> None:
    with paged_peers(wrong="fa4"):
        parts = run(tmp_path, "--parts", "decode", "--backends", "TORCH_SDPA")
    problems = {row["name"]: row["problem"] for row in parts["toy-decode"] if row["problem"]}
    assert list(problems) == ["FlashAttention 4"]
    assert problems["FlashAttention 4"].startswith("wrong numbers: error ")


def test_host_time(tmp_path: Path) -> None:
    found = run(tmp_path, "--parts", "host", "--backends", "TORCH_SDPA,TRITON_ATTN")["host"]
    rows = {row["name"]: row for row in found}
    assert set(rows["TORCH_SDPA: TORCH_SDPA"]["microseconds"]) == set(PARTS)
    # A chunk costs an edit of the table besides, and a step that is repeated builds nothing.
    times = rows["TORCH_SDPA: TORCH_SDPA"]["microseconds"]
    assert times["chunk"] > times["step"] > times["same step"] > 0
    assert rows["TRITON_ATTN"]["problem"].startswith("BackendRejectedError: ")


def test_the_platforms_default_is_marked_as_such(tmp_path: Path) -> None:
    (rows,) = run(tmp_path, "--parts", "chunk", "--no-peers", "--backends", "default").values()
    assert [(row["name"], row["kind"]) for row in rows] == [
        ("dense, TORCH_SDPA", "dense"),
        ("ours, default: TORCH_SDPA", "default"),
        ("ours, default: TORCH_SDPA, with its write", "default, written"),
    ]


def test_a_step_of_causal_wan_as_a_graph(tmp_path: Path) -> None:
    found = run(tmp_path, "--parts", "graph", "--backends", "TORCH_SDPA,TRITON_ATTN")["graph"]
    row, refused = found
    assert row["name"] == "TORCH_SDPA: TORCH_SDPA" and row["same_bits"] is True
    assert row["eager"] > 0 < row["replay"] and [
        len(row["rounds"][name]) for name in ("eager", "replay")
    ] == [2, 2]
    assert refused["problem"].startswith("BackendRejectedError: ") and refused["eager"] is None
    assert "| TORCH_SDPA: TORCH_SDPA |" in (tmp_path / "table.md").read_text()


def test_a_backend_without_graphs_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "omni_attn.models.wan.causal.stepping.cudagraph_supports",
        lambda groups: {"SOME_ATTN": AttentionCGSupport.NEVER},
    )
    (row,) = graph_rows(["TORCH_SDPA"], "wan-tiny", (32, 32), CPU, torch.float32, rounds=1, seed=0)
    assert "is not supported with SOME_ATTN" in row.problem
    assert graph_cells(row)[1] == row.problem and held_graph(row) == ""


def test_graph_targets() -> None:
    rows = [GraphRow("A", 3.0, 1.5, True), GraphRow("B", 3.0, 2.5, True), GraphRow("C", 3.0, 1.0, False)]
    assert [", missed" in held_graph(row) for row in rows] == [False, True, True]
    assert graph_cells(rows[0]) == ["A", "3.00", "1.50", "2.00", "yes"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", [TOY_CHUNK, TOY_DECODE])
def test_pages_hold_what_the_tensors_say(case: PagedCase, order: str) -> None:
    inputs = PagedInputs(case, CPU, torch.float32, order=order, seed=0)
    for row in range(case.reqs):
        pages = inputs.kv_cache[inputs.block_table[row].long()]
        for part, tensor in enumerate((inputs.keys, inputs.values)):
            assert torch.equal(pages[:, part].flatten(0, 1)[: case.keys], tensor[row])
    numbers = inputs.block_table.flatten()
    assert sorted(numbers.tolist()) == list(range(1, 1 + numbers.numel()))
    assert bool((numbers.diff() == 1).all()) == (order == "consecutive")


def test_sizes() -> None:
    chunk, decode = video_case(28080), decode_case()
    assert (chunk.keys, chunk.flops) == (32760, 4 * 4680 * 32760 * 12 * 128)
    assert decode.keys == 4096 and decode.cache_numbers == 2 * 64 * 4096 * 8 * 128


def timed(name: str, kind: str, milliseconds: float | None) -> Row:
    return Row(name, kind, milliseconds, error=2e-3, problem="" if milliseconds else "not here")


def test_targets_are_judged_by_the_fastest_peer() -> None:
    rows = [
        timed("FlashAttention 3", "peer", 1.0),
        timed("FlashInfer decode", "peer", 2.0),
        timed("ours, default: X", "default", 1.01),
        timed("ours, TRITON_ATTN (split)", "ours", 1.6),
        timed("ours, Y", "absent", None),
    ]
    assert list(held_calls(rows, VIDEO_TARGETS)) == [
        "ours, default: X is 0.990 times as fast as FlashAttention 3 (target 0.97).",
        "ours, TRITON_ATTN (split) is 0.625 times as fast as FlashAttention 3 (target 0.75, missed).",
    ]
    assert list(held_calls(rows, DECODE_TARGETS)) == [
        "ours, TRITON_ATTN (split) is 1.250 times as fast as FlashInfer decode (target 0.8)."
    ]
    assert list(held_calls(rows[2:], VIDEO_TARGETS)) == []
    *_, triton, absent = call_table(decode_case(), rows, 2).splitlines()
    assert triton == "| ours, TRITON_ATTN (split) | 1.600 | 671.1 | 0.62 | 2.0e-03 |  |"
    assert absent == "| ours, Y |  |  | not here |  |  |"


def test_host_targets() -> None:
    fast = HostRow("A", dict.fromkeys(PARTS, 50.0), dict.fromkeys(PARTS, 0))
    waits = HostRow("B", dict.fromkeys(PARTS, 50.0), {**dict.fromkeys(PARTS, 0), "chunk": 1})
    slow = HostRow("C", dict.fromkeys(PARTS, 61.0))
    plans = HostRow("FLASHINFER_ATTN (fa3)", dict.fromkeys(PARTS, 900.0), dict.fromkeys(PARTS, 2))
    absent = HostRow("D", problem="not here")
    sentences = list(held_host([fast, waits, slow, plans, absent]))
    assert [sentence[0] for sentence in sentences] == ["A", "B", "C"]
    assert [", missed" in sentence for sentence in sentences] == [False, True, True]
    assert host_cells(waits) == ["B", "50.0 (0)", "50.0 (0)", "50.0 (0)", "50.0 (1)"]
    assert host_cells(absent)[:2] == ["D", "not here"]


@pytest.mark.parametrize(
    "words",
    [
        ["--parts", "prefill"],
        ["--history", "many"],
        ["--history", "0"],
        ["--pages", "sorted"],
        ["--pixels", "100x128"],
    ],
)
def test_bad_words_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main([*words, "--toy"])
    assert error.value.code == 2


def test_a_cpu_refuses_the_real_size() -> None:
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU, found none"):
        main([])
