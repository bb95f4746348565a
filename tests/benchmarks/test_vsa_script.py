"""benchmarks/vsa.py at a size that a CPU runs: inputs, candidates, references and the table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks import vsa_candidates
from benchmarks.fastvideo_peer import PATHS, FastVideoAttention, FastVideoTiles
from benchmarks.vsa import main
from benchmarks.vsa_candidates import Setting
from benchmarks.vsa_checks import Reference, as_map, neighbour_overlap, shared, watched
from benchmarks.vsa_inputs import DTYPE, MAPS, Inputs, SparseCase, case_named
from omni_attn.ops.block_sparse.executor import Executor, SelectedBlocks
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from tests.benchmarks.fastvideo_stub import fastvideo_kernel

CPU = torch.device("cpu")
RAGGED = SparseCase("ragged", (3, 6, 10), (2, 4, 4), heads=2, head_size=32)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def inputs_of(case: SparseCase, maps: str) -> Inputs:
    return MAPS[maps](case, CPU, torch.Generator().manual_seed(0))


def make_torch(name: str, label: str) -> Executor:
    if name != "torch":
        raise ImportError(f"{label} is not here")
    return TorchExecutor()


class LosingExecutor(TorchExecutor):
    """Forgets one tile in each list."""

    def attend(self, packed, selected, softmax_scale, coarse=None):
        return super().attend(packed, selected._replace(counts=selected.counts - 1), softmax_scale, coarse)


def run(tmp_path: Path, case: str, *words: str) -> tuple[dict[str, object], ...]:
    file = tmp_path / "found.json"
    main(["--cases", case, "--percent", "50", "--rounds", "2", "--json", str(file), *words])
    groups: list[dict[str, object]] = json.loads(file.read_text())["groups"]
    return tuple(groups)


@pytest.mark.parametrize(
    ("case", "route", "expected"),
    [
        ("tiny/4x4x4", "VSA", {("bhsd", "FASTVIDEO_VSA_TRITON")}),
        (
            "tiny/4x8x8",
            "SDPA",
            {
                ("bshd", "FASTVIDEO_VSA_TRITON"),
                ("bshd", "FASTVIDEO_VSA_CUTEDSL"),
                ("bhsd", "FASTVIDEO_VSA_CUTEDSL"),
            },
        ),
    ],
)
def test_a_run(
    case: str,
    route: str,
    expected: set[tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(vsa_candidates, "make_executor", make_torch)
    with fastvideo_kernel() as calls:
        groups = run(tmp_path, case, "--executors", "torch,fa9")
    assert set(calls) == expected
    assert [group["maps"] for group in groups] == ["random", "correlated"]
    for group in groups:
        rows = {row["name"]: row for row in group["rows"]}
        assert rows["executor fa9"]["problem"] == "ImportError: FASTVIDEO_VSA (fa9) is not here"
        assert sorted(rows["executor torch"]["phases"]) == ["attend", "pack", "select"]
        assert rows["executor torch"]["as_exact"] == 1.0
        timed = [name for name, row in rows.items() if row["milliseconds"] is not None]
        assert {name.partition(",")[0] for name in timed} >= {
            "dense TORCH_SDPA",
            "executor torch",
            f"layer FASTVIDEO_VSA (torch): {route}",
            "fastvideo triton",
        }
        assert all(rows[name]["error"] < 2e-2 and rows[name]["problem"] == "" for name in timed)
    printed = capsys.readouterr().out
    assert f"{case}, correlated maps, 50 %" in printed
    assert "fastvideo triton, with packing" in printed and "fastvideo triton, in tile order" in printed


def test_wrong_numbers_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vsa_candidates, "make_executor", lambda name, label: LosingExecutor())
    (group,) = run(tmp_path, "tiny/2x4x4", "--executors", "torch", "--no-peers", "--maps", "random")
    (row,) = (row for row in group["rows"] if row["name"] == "executor torch")
    assert row["milliseconds"] is None and row["problem"].startswith("wrong numbers: error ")


def test_a_cpu_refuses_large_cases() -> None:
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU, found none: wan-14b-720p/4x8x8"):
        main([])


@pytest.mark.parametrize(
    "words",
    [
        ["--cases", "wan-14b/4x4x4"],
        ["--cases", "tiny"],
        ["--cases", "tiny-cross/4x4x4"],
        ["--percent", "0"],
        ["--maps", "smooth"],
    ],
)
def test_bad_words_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(words)
    assert error.value.code == 2


def test_the_reference_is_dense_where_all_tiles_are_chosen() -> None:
    inputs, tiles = inputs_of(RAGGED, "random"), RAGGED.tiles(CPU)
    reference = Reference(inputs._replace(gate=torch.zeros_like(inputs.gate)), tiles, RAGGED.scale)
    every = torch.ones(1, RAGGED.heads, RAGGED.num_tiles, RAGGED.num_tiles, dtype=torch.bool)
    rows, mass = reference.sparse(every)
    torch.testing.assert_close(rows, reference.dense)
    assert mass == pytest.approx(1.0)


def test_the_reference_agrees_with_the_composition() -> None:
    setting = Setting(RAGGED, inputs_of(RAGGED, "random"), sparsity=0.5, topk=6)
    reference = Reference(setting.inputs, RAGGED.tiles(CPU), RAGGED.scale)
    selected = setting.selected_by(TorchExecutor())
    assert selected.sum(-1).eq(6).all()
    rows, mass = reference.sparse(selected)
    assert reference.error(setting.composed(TorchExecutor()), rows) < 5e-3
    assert 0.3 < mass < 0.8


def test_correlated_inputs_make_attention_local() -> None:
    case = case_named("ltx-512p/4x4x4")
    few = SparseCase(case.name, case.grid, case.tile, heads=2, head_size=128)
    found = {}
    for maps in MAPS:
        reference = Reference(inputs_of(few, maps), few.tiles(CPU), few.scale)
        selected = reference.exact_map(few.num_tiles // 10)
        found[maps] = reference.sparse(selected)[1], neighbour_overlap(selected)
    assert found["random"][0] < 0.2 and found["random"][1] < 0.2
    assert found["correlated"][0] > 0.7 and found["correlated"][1] > 0.3


def test_lists_as_maps() -> None:
    indices = torch.tensor([[[[0, 2, 9], [1, 0, 0]]]], dtype=torch.int32)
    selected = SelectedBlocks(indices, torch.tensor([[[2, 1]]], dtype=torch.int32))
    expected = torch.tensor([[[[True, False, True], [False, True, False]]]])
    assert as_map(selected, 3).equal(expected)
    assert shared(expected, expected) == 1.0 and neighbour_overlap(expected) == 0.0


def test_tile_and_untile_are_inverse_and_pad_with_zeros() -> None:
    inputs, tiles = inputs_of(RAGGED, "random"), RAGGED.tiles(CPU)
    passes = FastVideoTiles(tiles)
    tiled = passes.tile(inputs)
    for tensor, packed in zip(inputs, tiled, strict=True):
        assert packed.dtype == DTYPE and packed.equal(tiles.pack(tensor))
        assert passes.untile(packed).equal(tensor)


def test_a_watched_executor_is_itself_again() -> None:
    executor = TorchExecutor()
    setting = Setting(RAGGED, inputs_of(RAGGED, "random"), sparsity=0.5, topk=6)
    with watched(executor, CPU) as watch:
        setting.composed(executor)
    assert set(watch.marks) == {"pack", "attend"} and all(time >= 0 for time in watch.phases().values())
    assert not vars(executor)


def test_switches_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTVIDEO_VSA_TK", "1")
    monkeypatch.delenv("FASTVIDEO_VSA_TRITON", raising=False)
    before = dict(os.environ)
    with fastvideo_kernel() as calls:
        peer = FastVideoAttention(PATHS[1], RAGGED, 6, CPU)
        passes = FastVideoTiles(RAGGED.tiles(CPU))
        peer.kernel(peer.layout(passes.tile(inputs_of(RAGGED, "random"))))
    assert calls == [("bhsd", "FASTVIDEO_VSA_TRITON")]
    assert dict(os.environ) == before
