"""Joint schedules against diffusers' schedulers, the FastH3 grids, and the update written out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers import MiniMaxH3Scheduler
from hypothesis import given
from hypothesis import strategies as st

from omni_attn.errors import ConfigError, MetadataError
from omni_attn.models.minimax_h3 import schedule as module
from omni_attn.models.minimax_h3.schedule import (
    FASTH3_V1_PLAN,
    FASTH3_V2_PLAN,
    MINIMAX_H3_PLAN,
    JointSchedule,
    SamplingPlan,
)


@given(st.integers(2, 80))
def test_even_grids_are_those_of_diffusers(points: int) -> None:
    found = JointSchedule.for_plan(MINIMAX_H3_PLAN, points)
    video, audio = MiniMaxH3Scheduler(shift=12.0), MiniMaxH3Scheduler(shift=3.0)
    for scheduler in (video, audio):
        scheduler.set_timesteps(points)
    assert len(found.steps) == points - 1
    assert [step.index for step in found.steps] == list(range(points - 1))
    assert [step.video_time for step in found.steps] == video.timesteps.tolist()
    assert [step.audio_time for step in found.steps] == audio.timesteps.tolist()
    assert [step.sigma for step in found.steps] == video.sigmas[:-1].tolist()


def test_fifty_points_are_forty_nine_forwards() -> None:
    assert len(JointSchedule.for_plan(MINIMAX_H3_PLAN).steps) == 49


def test_first_fasth3_grid() -> None:
    found = JointSchedule.for_plan(FASTH3_V1_PLAN)
    assert found.video.sigmas.tolist() == pytest.approx([0.99992, 0.97283, 0.92308, 0.8, 0], abs=5e-6)
    wanted = [3 * u / (1 + 2 * u) for u in (0.999, 0.749, 0.5, 0.25, 0)]
    assert found.audio.sigmas.tolist() == pytest.approx(wanted, abs=1e-7)
    assert len(found.steps) == 4


def test_second_fasth3_grid_has_another_video_shift() -> None:
    found = JointSchedule.for_plan(FASTH3_V2_PLAN, 9)
    wanted = [10 * u / (1 + 9 * u) for u in (0.999, 0.874, 0.749, 0.624, 0.5, 0.375, 0.25, 0.125)]
    assert [step.sigma for step in found.steps] == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize("plan", [SamplingPlan(video_shift=5.0), FASTH3_V1_PLAN])
def test_steps_follow_the_formula(plan: SamplingPlan) -> None:
    schedule = JointSchedule.for_plan(plan, len(plan.grid) if plan.grid else 6)
    generator = torch.Generator().manual_seed(3)
    rows = (torch.randn(1, 6, 8, generator=generator), torch.randn(1, 4, 5, generator=generator))
    exact = [sample.double() for sample in rows]
    for step in schedule.steps:
        velocities = (torch.randn(1, 6, 8, generator=generator), torch.randn(1, 4, 5, generator=generator))
        rows = schedule.step(step, velocities, rows)
        for which, (velocity, scheduler) in enumerate(
            zip(velocities, (schedule.video, schedule.audio), strict=True)
        ):
            now, later = scheduler.sigmas[step.index : step.index + 2].double()
            clean = exact[which] + now * velocity.double()
            exact[which] = later / now * exact[which] + (1 - later / now) * clean
    for found, wanted in zip(rows, exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_velocities_in_bfloat16_move_rows_in_float32() -> None:
    schedule = JointSchedule.for_plan(MINIMAX_H3_PLAN, 3)
    rows = (torch.randn(1, 6, 8), torch.randn(1, 4, 5))
    velocities = (torch.randn(1, 6, 8).bfloat16(), torch.randn(1, 4, 5).bfloat16())
    found = schedule.step(schedule.steps[0], velocities, rows)
    assert {tensor.dtype for tensor in found} == {torch.float32}


def test_steps_out_of_order_are_refused() -> None:
    schedule = JointSchedule.for_plan(MINIMAX_H3_PLAN, 4)
    rows = (torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
    schedule.step(schedule.steps[0], rows, rows)
    with pytest.raises(MetadataError, match="step 0 came where step 1 was next"):
        schedule.step(schedule.steps[0], rows, rows)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: JointSchedule.for_plan(MINIMAX_H3_PLAN, 1), "num_inference_steps is 1; it counts points"),
        (lambda: JointSchedule.for_plan(MINIMAX_H3_PLAN, 2.5), "is 2.5; .* whole number"),  # type: ignore[arg-type]
        (
            lambda: JointSchedule.for_plan(FASTH3_V1_PLAN, 8),
            r"is 8, and the model is distilled to a grid of 5 points \(4 forwards\)",
        ),
        (lambda: SamplingPlan(audio_shift=0.0), "audio_shift is 0.0; needs a number above 0"),
        (lambda: SamplingPlan(video_shift=float("nan")), "video_shift is nan"),
        (lambda: SamplingPlan(grid=(0.5, 0.5, 0.0)), r"base grid \[0.5, 0.5, 0.0\]"),
        (lambda: SamplingPlan(grid=(0.5, 0.25)), "the last one 0"),
        (lambda: SamplingPlan(grid=(0.0,)), "two or more points"),
        (lambda: SamplingPlan(grid=(1.5, 0.0)), "from 1 or less"),
    ],
)
def test_refuses(call: object, text: str) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=text):
        call()


def test_so_many_points_that_a_shift_joins_two_of_them() -> None:
    # Neighbours of u = 1 are closer than float32 tells apart once the shift has divided their distance.
    with pytest.raises(ConfigError, match=r"5000000 points with shift 12.0 are .* different noise levels"):
        JointSchedule.for_plan(MINIMAX_H3_PLAN, 5_000_000)


def test_an_old_diffusers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "import_extra", lambda *_: SimpleNamespace(__version__="0.35.0"))
    with pytest.raises(ConfigError, match=r"diffusers 0.35.0 has no MiniMaxH3Scheduler"):
        JointSchedule.for_plan(MINIMAX_H3_PLAN)
