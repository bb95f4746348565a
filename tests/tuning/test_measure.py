"""Slow loses, coarse is past the bound, wrong is marked, broken is told: and the others are still measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from omni_attn.errors import ConfigError
from omni_attn.tuning import clocks
from omni_attn.tuning.bench import ShapeResults, bench, mean_default_ratio
from omni_attn.tuning.candidates import candidates_for, every_spec, specs_named
from omni_attn.tuning.cases import case_of_shape
from omni_attn.tuning.measure import measure
from omni_attn.tuning.shapes import SHAPES
from tests.selection.stubs import registered
from tests.tuning.stubs import (
    CPU,
    AbsentBackend,
    CoarseBackend,
    CrashingBackend,
    NaNBackend,
    QuickBackend,
    SlowBackend,
    VariantsBackend,
    WrongBackend,
    cpu,
    measured,
    pair,
    tiny,
)


def test_times_and_rates() -> None:
    with registered(pair(SlowBackend), pair(QuickBackend)):
        found = measured("QUICK_TEST", "TORCH_SDPA", "SLOW_TEST")
    times = [result.milliseconds or 0.0 for result in found.values()]
    assert times == sorted(times) and times[2] > 20
    for result in found.values():
        assert result.status == "measured" and len(result.rounds) == 3
        assert sorted(result.rounds)[1] == result.milliseconds
        assert result.error is not None and result.error < 1e-6 and not result.is_broken
        work = 4 * 256 * 256 * 4 * 64
        assert result.tflops == pytest.approx(work / (result.milliseconds or 0.0) / 1e9)
        assert result.peak_bytes is None  # nobody counts a CPU's memory


def test_rounds_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []

    class Recording(clocks.WallClock):
        def milliseconds(self, call: Any) -> float:
            order.append(id(call))
            return 1.0

    monkeypatch.setattr("omni_attn.tuning.measure.clock_for", Recording)
    with registered(pair(QuickBackend)):
        measured("TORCH_SDPA", "QUICK_TEST", rounds=3)
    assert len(order) == 6 and order[:2] * 3 == order and order[0] != order[1]


def test_past_the_error_is_not_timed() -> None:
    with registered(pair(CoarseBackend)):
        bounded = measured("COARSE_TEST", max_error=5e-3)["COARSE_TEST"]
        free = measured("COARSE_TEST", max_error=3e-2)["COARSE_TEST"]
    assert (bounded.status, bounded.milliseconds, bounded.rounds) == ("past the error", None, ())
    assert bounded.reason == "error 2.0e-02, allowed 5.0e-03"
    assert free.status == "measured" and free.error == pytest.approx(2e-2, rel=1e-3) and not free.is_broken


def test_nan_is_within_no_error() -> None:
    with registered(pair(NaNBackend)):
        assert measured("NAN_TEST", max_error=1e9)["NAN_TEST"].status == "past the error"
        unbounded = measured("NAN_TEST")["NAN_TEST"]
    assert unbounded.status == "measured" and unbounded.is_broken
    assert json.loads(json.dumps(unbounded.to_dict(), allow_nan=False))["error"] is None


def test_failures_are_findings() -> None:
    with registered(pair(CrashingBackend), pair(AbsentBackend), pair(WrongBackend)):
        found = measured("CRASHING_TEST", "ABSENT_TEST", "CUDNN_ATTN", "WRONG_TEST", "TORCH_SDPA")
    crashed, absent, refused, wrong, good = found.values()
    assert (crashed.status, crashed.reason) == ("failed", "RuntimeError: illegal memory access")
    assert absent.status == "refused" and "pip install nothing" in absent.reason
    assert refused.status == "refused" and "needs a cuda device, found cpu" in refused.reason
    assert wrong.is_broken and wrong.status == "measured"
    assert good.status == "measured" and not good.is_broken


def test_a_kernel_that_fails_later_is_told_too() -> None:
    class Late:
        def __init__(self, device: torch.device) -> None:
            self.calls = 0

        def milliseconds(self, call: Any) -> float:
            self.calls += 1
            if self.calls == 3:
                raise ValueError("grid too large")
            return 1.0

    with pytest.MonkeyPatch.context() as patch, registered(pair(QuickBackend)):
        patch.setattr("omni_attn.tuning.measure.clock_for", Late)
        found = measured("TORCH_SDPA", "QUICK_TEST")
    assert (found["TORCH_SDPA"].status, found["TORCH_SDPA"].reason) == (
        "failed",
        "ValueError: grid too large",
    )
    assert found["TORCH_SDPA"].milliseconds is None
    assert found["QUICK_TEST"].rounds == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["TORCH_SDPA"], [(1, "tiny, first calls"), (4, "tiny, timing")]),
        # Two are refused by facts, one by its package, one is past the error, one raises.
        (
            [
                "CUDNN_ATTN",
                "FLASH_ATTN",
                "ABSENT_TEST",
                "COARSE_TEST",
                "CRASHING_TEST",
                "TORCH_SDPA",
                "QUICK_TEST",
            ],
            [(5, "tiny, first calls"), (8, "tiny, timing")],
        ),
        (["CUDNN_ATTN"], []),
    ],
)
def test_progress_counts_what_runs(names: list[str], expected: list[tuple[int, str]]) -> None:
    seen: list[tuple[int, str]] = []

    def progress(items: Any, total: int, description: str) -> Any:
        steps = list(items)
        assert len(steps) == total
        seen.append((total, description))
        return steps

    with registered(*map(pair, (AbsentBackend, CoarseBackend, CrashingBackend, QuickBackend))):
        found = measured(*names, rounds=4, max_error=5e-3, progress=progress)
    assert seen == expected and list(found)[-1].partition(" ")[0] == names[-1]


def test_wrong_numbers_have_both_errors() -> None:
    with registered(pair(WrongBackend), pair(NaNBackend)):
        found = measured("WRONG_TEST", "NAN_TEST")
    assert found["WRONG_TEST"].wrong_numbers == "wrong numbers: error 5.0e-1, documented 2.3e-3"
    assert found["NAN_TEST"].wrong_numbers == "wrong numbers: error nan, documented 2.3e-3"
    candidate = replace(found["WRONG_TEST"].candidate, documented=None)
    undocumented = replace(found["WRONG_TEST"], candidate=candidate)
    assert undocumented.wrong_numbers == "wrong numbers: error 5.0e-1, documented none, held to 1.0e-2"


def test_masked_case() -> None:
    padded = case_of_shape(SHAPES["tiny-padded"], "float32")
    found = measured("TORCH_SDPA", "FLASH_ATTN", case=padded)
    assert (found["TORCH_SDPA"].error or 1.0) < 1e-6
    assert [label for label, result in found.items() if result.status == "refused"] == ["FLASH_ATTN"]


# --- which candidates there are


def test_every_variant_is_a_candidate() -> None:
    with registered(pair(VariantsBackend)):
        specs = every_spec(cpu())
        assert [s.variant for s in specs if s.backend == "VARIANTS_TEST"] == ["here", "there"]
        here, there = candidates_for(tiny().request, cpu(), specs_named(["variants_test"], cpu()))
        (pinned,) = specs_named(["VARIANTS_TEST:there"], cpu())
    assert here.label == "VARIANTS_TEST (here)" and here.verdict.accepted
    assert there.label == "VARIANTS_TEST (there)" and "needs a musa device" in there.verdict.reasons[0]
    assert pinned.variant == "there"


def test_aliases_and_repeats() -> None:
    specs = specs_named(["sdpa", "TORCH_SDPA", "flash_attn:fa3", "FLASH_ATTN"], cpu())
    assert [(s.backend, s.variant) for s in specs] == [
        ("TORCH_SDPA", None),
        ("FLASH_ATTN", "fa3"),
        ("FLASH_ATTN", "fa4"),
        ("FLASH_ATTN", "fa2"),
    ]


def test_unknown_candidates_all_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        specs_named(["FLASH_ATN", "FLASH_ATTN:fa33", "TORCH_SDPA:fast", "a b"], cpu())
    name, variant, without, spaces = error.value.problems
    assert "Did you mean FLASH_ATTN?" in name
    assert "FLASH_ATTN has no variant 'fa33'. Did you mean fa3?" in variant
    assert "TORCH_SDPA has no variant 'fast'. It has none" in without
    assert "one word without spaces" in spaces


def test_a_plug_in_that_leads_nowhere_is_refused_alone() -> None:
    with registered(("NOWHERE_TEST", "no.such.module.Class")):
        found = measured("NOWHERE_TEST", "TORCH_SDPA")
    assert found["NOWHERE_TEST"].status == "refused" and "no.such.module" in found["NOWHERE_TEST"].reason
    assert found["TORCH_SDPA"].status == "measured"


# --- the default against the best


def shape_results(*names: str) -> ShapeResults:
    specs = specs_named(names, cpu())
    (found,) = bench([SHAPES["tiny"]], cpu(), CPU, "float32", specs=specs, rounds=3)
    return found


def test_default_against_the_fastest() -> None:
    with registered(pair(QuickBackend), pair(SlowBackend)):
        found = shape_results("TORCH_SDPA", "SLOW_TEST", "QUICK_TEST")
    assert (found.default, found.best and found.best.label) == ("TORCH_SDPA", "QUICK_TEST")
    sdpa = next(result for result in found.results if result.label == "TORCH_SDPA")
    assert found.best is not None and found.default_ratio is not None
    assert found.default_ratio == pytest.approx((found.best.milliseconds or 0) / (sdpa.milliseconds or 1))
    assert found.default_ratio < 1
    assert mean_default_ratio([found, found]) == found.default_ratio


def test_neither_coarse_nor_wrong_is_the_best() -> None:
    with registered(pair(CoarseBackend), pair(WrongBackend)):
        found = shape_results("TORCH_SDPA", "COARSE_TEST", "WRONG_TEST")
    assert found.best is not None and found.best.label == "TORCH_SDPA"
    assert found.default_ratio == 1


def test_a_default_that_was_left_out_has_no_ratio() -> None:
    with registered(pair(QuickBackend)):
        found = shape_results("QUICK_TEST")
    assert (found.default, found.default_ratio) == ("TORCH_SDPA", None)
    assert mean_default_ratio([found]) is None


# --- what would take too long


def test_a_large_shape_is_refused_on_a_cpu_with_an_estimate() -> None:
    text = (
        r"wan-14b-720p: 75600 x 75600 .* on a CPU: about \d+ (minutes|hours|days) for \d+ calls of 117 TFLOP"
    )
    with pytest.raises(ConfigError, match=text):
        next(bench([SHAPES["tiny"], SHAPES["wan-14b-720p"]], cpu(), CPU, "float32", rounds=7))


def test_memory_is_checked_before_a_gpu_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_attn.tuning.estimate import check_cost

    monkeypatch.setattr("omni_attn.models.runtime.available_memory", lambda device: 2**30)
    case = case_of_shape(SHAPES["wan-14b-720p"], "bfloat16")
    with pytest.raises(
        ConfigError, match=r"Measuring wan-14b-720p .* needs \d+\.\d+ GiB on cuda, and 1.00 GiB"
    ):
        check_cost(case, torch.device("cuda"), 1)


def test_a_sparse_backend_tells_the_route_around_its_kernel() -> None:
    """The tiny video has four tiles, which are all kept: what was measured is dense attention, and the row says so."""
    found = measured("TORCH_SDPA", "FASTVIDEO_VSA")
    result = found["FASTVIDEO_VSA (torch)"]
    assert result.status == "measured" and result.error is not None and result.error < 1e-6
    assert result.route is not None and "SDPA" in result.route and "all 4 tiles" in result.route
    assert found["TORCH_SDPA"].route is None and result.to_dict()["route"] == result.route


def test_a_sparse_backend_is_not_measured_without_a_grid() -> None:
    case = replace(case_of_shape(SHAPES["tiny"], "float32"), grid=None)
    candidates = candidates_for(case.request, cpu(), specs_named(["FASTVIDEO_VSA:torch"], cpu()))
    (result,) = measure(case, candidates, cpu(), CPU, rounds=1)
    assert result.status == "refused" and "grid" in result.reason and "random" in result.reason
