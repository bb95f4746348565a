"""The noise schedules of video and sound, stepped together: two of diffusers' MiniMax-H3 schedulers.

A base grid u from 1 (noise) to 0 gives the noise levels s * u / (1 + (s - 1) * u), with a shift s of its own for each
modality; the model reads t = 1 - sigma. The last point has no forward: N points are N - 1 steps, and
`num_inference_steps` counts points, as in diffusers and MiniMax's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from omni_attn.errors import ConfigError, MetadataError
from omni_attn.models.minimax_h3.contract import FASTH3_PREVIEW, InferenceContract
from omni_attn.models.runtime import import_extra

DEFAULT_POINTS = 50


@dataclass(frozen=True, kw_only=True)
class SamplingPlan:
    """How a checkpoint is sampled.

    Attributes:
        video_shift, audio_shift: of the two schedules.
        grid: base grid that a distilled checkpoint was trained on, its last 0 included; None = evenly spaced, as many
            points as a person asks for.

    Raises:
        ConfigError: a shift that is not positive, or a grid that does not fall from 1 or less to 0.
    """

    video_shift: float = 12.0
    audio_shift: float = 3.0
    grid: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("video_shift", "audio_shift"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; needs a number above 0.")
        grid = self.grid
        if grid is not None and not (
            len(grid) > 1 and 0 < grid[0] <= 1 and grid[-1] == 0 and all(a > b for a, b in pairwise(grid))
        ):
            raise ConfigError(
                f"base grid {list(grid)}: needs two or more points that fall from 1 or less to 0, the last one 0."
            )

    @classmethod
    def of_contract(cls, contract: InferenceContract) -> SamplingPlan:
        """How a distilled checkpoint with this contract is sampled; shifts that it leaves open are the base model's."""
        shifts = {
            "video_shift": contract.video_scheduler_shift,
            "audio_shift": contract.audio_scheduler_shift,
        }
        stated = {name: shift for name, shift in shifts.items() if shift is not None}
        return cls(grid=contract.base_grid, **stated)

    def points(self, num_inference_steps: int | None = None) -> int:
        """Points of the grid; a person's number, None = not stated, has to be that of a fixed grid.

        Raises:
            ConfigError: fewer than 2, or other than the fixed grid has.
        """
        if self.grid is not None:
            if num_inference_steps not in (None, len(self.grid)):
                raise ConfigError(
                    f"num_inference_steps is {num_inference_steps}, and the model is distilled to a grid of "
                    f"{len(self.grid)} points ({len(self.grid) - 1} forwards): leave num_inference_steps out."
                )
            return len(self.grid)
        points = DEFAULT_POINTS if num_inference_steps is None else num_inference_steps
        if isinstance(points, bool) or not isinstance(points, int) or points < 2:
            raise ConfigError(
                f"num_inference_steps is {points}; it counts points of the grid, the clean end included: use a whole "
                "number, 2 or more."
            )
        return points


MINIMAX_H3_PLAN = SamplingPlan()
FASTH3_V1_PLAN = SamplingPlan.of_contract(FASTH3_PREVIEW)  # 4 forwards
FASTH3_V2_PLAN = SamplingPlan(  # 8 forwards
    video_shift=10.0, grid=(0.999, 0.874, 0.749, 0.624, 0.5, 0.375, 0.25, 0.125, 0.0)
)


@dataclass(frozen=True)
class JointStep:
    """One forward: its index, t of video and of audio (0 noise, 1 clean), and the video's noise level 1 - t."""

    index: int
    video_time: float
    audio_time: float
    sigma: float


class JointSchedule:
    """Video and audio schedulers of one denoising loop. Their tables stay on the host: no step waits for a device.

    Args:
        video, audio: diffusers' MiniMaxH3Scheduler with the shifts of the checkpoint, from `for_plan` or its folders.
        grid: a fixed base grid; None = evenly spaced.
        num_inference_steps: points of the grid; None = those of the fixed one, or 50.

    Raises:
        ConfigError: as `SamplingPlan` and its `points`; or so many points that a shift makes two of them one.
    """

    def __init__(
        self,
        video: Any,
        audio: Any,
        *,
        grid: Sequence[float] | None = None,
        num_inference_steps: int | None = None,
    ) -> None:
        plan = SamplingPlan(
            video_shift=video.shift, audio_shift=audio.shift, grid=None if grid is None else tuple(grid)
        )
        points = plan.points(num_inference_steps)
        self.video, self.audio = video, audio
        for scheduler in (video, audio):
            if plan.grid is None:
                scheduler.set_timesteps(points, device="cpu")
            else:
                scheduler.set_timesteps(sigmas=[shifted(u, scheduler.shift) for u in plan.grid], device="cpu")
            if len(scheduler.timesteps) != points - 1:
                raise ConfigError(
                    f"{points} points with shift {scheduler.shift} are {len(scheduler.timesteps) + 1} different noise "
                    "levels in float32: ask for fewer num_inference_steps."
                )
        self.steps = tuple(
            JointStep(index, *times)
            for index, times in enumerate(
                zip(
                    video.timesteps.tolist(),
                    audio.timesteps.tolist(),
                    video.sigmas[:-1].tolist(),
                    strict=True,
                )
            )
        )

    @classmethod
    def for_plan(cls, plan: SamplingPlan, num_inference_steps: int | None = None) -> JointSchedule:
        """Schedulers of this plan.

        Raises:
            ConfigError: `num_inference_steps` does not fit the plan, or diffusers is too old.
            MissingExtraError: diffusers is not installed.
        """
        return cls(*build_schedulers(plan), grid=plan.grid, num_inference_steps=num_inference_steps)

    def step(
        self, step: JointStep, velocities: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Target rows of video and of audio at the next noise level, in new memory and in their own dtype.

        Args:
            step: the current one; steps are taken in order.
            velocities: the model's answers for the target rows, towards the clean latents.
            rows: the target rows now; float32.

        Raises:
            MetadataError: a step out of order.
        """
        taken = self.video.step_index
        if taken not in (None, step.index):
            raise MetadataError(
                f"step {step.index} came where step {taken} was next: take a schedule's steps in order, and build "
                "another one for another loop."
            )
        video, audio = (
            scheduler.step(
                velocity.to(sample.dtype), scheduler.timesteps[step.index], sample, return_dict=False
            )[0]
            for scheduler, velocity, sample in zip((self.video, self.audio), velocities, rows, strict=True)
        )
        return video, audio


def build_schedulers(plan: SamplingPlan) -> tuple[Any, Any]:
    """diffusers' MiniMaxH3Scheduler for video and for audio, with the shifts of this plan.

    Raises:
        ConfigError: diffusers is too old.
        MissingExtraError: diffusers is not installed.
    """
    diffusers = import_extra("diffusers", "Sampling")
    build = getattr(diffusers, "MiniMaxH3Scheduler", None)
    if build is None:
        raise ConfigError(
            f"diffusers {diffusers.__version__} has no MiniMaxH3Scheduler, which 0.42.1 has: update diffusers."
        )
    return build(shift=plan.video_shift), build(shift=plan.audio_shift)


def shifted(u: float, shift: float) -> float:
    """The noise level of a point of the base grid."""
    return shift * u / (1 + (shift - 1) * u)
