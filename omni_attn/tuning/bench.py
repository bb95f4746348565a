"""The named shapes on every backend, and how the platform default compares with the fastest exact one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch

from omni_attn.config import AttentionSpec
from omni_attn.errors import OmniAttnError
from omni_attn.models.runtime import Progress, no_progress
from omni_attn.platforms import OmniPlatform
from omni_attn.tuning.candidates import candidates_for, every_spec
from omni_attn.tuning.cases import case_of_shape
from omni_attn.tuning.estimate import check_cost
from omni_attn.tuning.measure import Result, measure
from omni_attn.tuning.shapes import Shape

ROUNDS = 7
# Calls of a candidate beside those of the rounds: for its error, for its memory, and to size a sample of the clock.
EXTRA_CALLS = 3


@dataclass(frozen=True)
class ShapeResults:
    """What was found on one shape.

    Attributes:
        default: label of what the platform would choose by itself, None if it can choose nothing.
    """

    shape: Shape
    results: tuple[Result, ...]
    default: str | None

    @property
    def measured(self) -> tuple[Result, ...]:
        """The results that have a time."""
        return tuple(result for result in self.results if result.milliseconds is not None)

    @property
    def best(self) -> Result | None:
        """The fastest exact result, None if there is none."""
        exact = [r for r in self.measured if r.candidate.numerics == "exact" and not r.is_broken]
        return min(exact, key=_milliseconds, default=None)

    @property
    def default_ratio(self) -> float | None:
        """Speed of the default over that of the fastest exact backend, at most 1; None if the default was not timed."""
        default = next((result for result in self.measured if result.label == self.default), None)
        if default is None or self.best is None:
            return None
        return _milliseconds(self.best) / _milliseconds(default)

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            **asdict(self.shape),
            "default": self.default,
            "best": None if self.best is None else self.best.label,
            "default_ratio": self.default_ratio,
            "results": [result.to_dict() for result in self.results],
        }


def bench(
    shapes: Iterable[Shape],
    platform: OmniPlatform,
    device: torch.device,
    dtype: str,
    *,
    specs: tuple[AttentionSpec, ...] | None = None,
    rounds: int = ROUNDS,
    progress: Progress = no_progress,
) -> Iterator[ShapeResults]:
    """The results of each shape, as they come; nothing is started before every shape is known to fit.

    Args:
        specs: what to measure, None = every registered backend and variant.

    Raises:
        ConfigError: a shape does not fit this machine's memory, or would take a CPU too long.
    """
    chosen = every_spec(platform) if specs is None else specs
    cases = [(shape, case_of_shape(shape, dtype)) for shape in shapes]
    judged = [candidates_for(case.request, platform, chosen) for _, case in cases]
    for (_, case), candidates in zip(cases, judged, strict=True):
        accepted = sum(candidate.verdict.accepted for candidate in candidates)
        check_cost(case, device, accepted * (rounds + EXTRA_CALLS))
    for (shape, case), candidates in zip(cases, judged, strict=True):
        results = measure(case, candidates, platform, device, rounds=rounds, progress=progress)
        try:
            selection = case.layer(None, platform).selection
        except OmniAttnError:
            selection = None
        yield ShapeResults(shape, results, None if selection is None else selection.label)


def mean_default_ratio(found: Iterable[ShapeResults]) -> float | None:
    """Mean over the shapes on which the default was timed, None if there is none."""
    ratios = [results.default_ratio for results in found if results.default_ratio is not None]
    return statistics.mean(ratios) if ratios else None


def _milliseconds(result: Result) -> float:
    assert result.milliseconds is not None
    return result.milliseconds
