"""All candidates on one call: error first, then time in rounds that alternate between them."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from omni_attn.errors import BackendImportError, OmniAttnError
from omni_attn.models.runtime import Progress, no_progress
from omni_attn.plain import to_plain
from omni_attn.platforms import OmniPlatform
from omni_attn.preparation import prepare_attention
from omni_attn.tuning.candidates import Candidate
from omni_attn.tuning.cases import Case, Tensors
from omni_attn.tuning.clocks import Call, clock_for, peak_bytes

Status = Literal["measured", "past the error", "refused", "failed"]

# An exact kernel this far beyond its documented error is broken, whatever its speed.
BROKEN = 5.0
UNDOCUMENTED_ERROR = 1e-2
# Random tokens have no neighbours that are alike: what a selection of tiles loses on them says nothing about a video.
_NO_GRID = (
    "needs the (T, H, W) grid of a video, which a role does not state; what it loses is to be judged on a model's own "
    "queries and keys, not on random ones"
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One candidate on one call.

    Attributes:
        status: measured; past the error that was allowed; refused by its facts or by its package; failed in a call.
        reason: why it was not measured, "" otherwise.
        milliseconds: median of the rounds; rounds: all of them.
        tflops: 4 B Sq Sk H D / time.
        error: relative Frobenius error of the sampled query rows against float64.
        peak_bytes: most memory of a call beyond its inputs, output included; None on a CPU.
        route: what ran in place of the candidate's own kernel, by a rule of the backend; None = nothing.
    """

    candidate: Candidate
    status: Status
    reason: str = ""
    milliseconds: float | None = None
    rounds: tuple[float, ...] = ()
    tflops: float | None = None
    error: float | None = None
    peak_bytes: int | None = None
    route: str | None = None

    @property
    def label(self) -> str:
        """Backend and variant."""
        return self.candidate.label

    @property
    def is_broken(self) -> bool:
        """True where an exact kernel's numbers are not those of attention."""
        limit = BROKEN * (self.candidate.documented or UNDOCUMENTED_ERROR)
        exact = self.candidate.numerics == "exact"
        return exact and self.error is not None and not self.error <= limit  # NaN is no number either

    @property
    def wrong_numbers(self) -> str:
        """What the tables say of a broken one, with both errors."""
        documented = self.candidate.documented
        held_to = (
            f"documented none, held to {_scientific(UNDOCUMENTED_ERROR)}"
            if documented is None
            else f"documented {_scientific(documented)}"
        )
        return f"wrong numbers: error {_scientific(self.error)}, {held_to}"

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        spec = self.candidate.spec
        return {
            "backend": spec.backend,
            "variant": spec.variant,
            "spec": to_plain(spec),
            "numerics": self.candidate.numerics,
            "status": self.status,
            "reason": self.reason,
            "milliseconds": self.milliseconds,
            "rounds": list(self.rounds),
            "tflops": self.tflops,
            # JSON has no NaN
            "error": None if self.error is None or self.error != self.error else self.error,
            "peak_bytes": self.peak_bytes,
            "route": self.route,
        }


def measure(
    case: Case,
    candidates: Iterable[Candidate],
    platform: OmniPlatform,
    device: torch.device,
    *,
    rounds: int,
    max_error: float | None = None,
    progress: Progress = no_progress,
) -> tuple[Result, ...]:
    """A result for each candidate, in their order.

    Args:
        platform: facts of the device that is measured.
        rounds: each candidate is timed once in each; the median counts.
        max_error: candidates past this relative error, or with numbers that are not finite, are not timed.
        progress: draws a bar over the first calls, then one over the timed ones; of candidates that run, and no others.
    """
    run = _Run(case, tuple(candidates), platform, device, max_error)
    with torch.inference_mode():
        _each(run.try_out, run.accepted(), progress, f"{case.name}, first calls")
        # Only now is it known which packages load and which numbers are within the error.
        _each(run.time, run.taking_part() * rounds, progress, f"{case.name}, timing")
    return tuple(run.result(n) for n in range(len(run.candidates)))


def _each(step: Callable[[int], None], numbers: list[int], progress: Progress, description: str) -> None:
    if numbers:
        for number in progress(numbers, len(numbers), description):
            step(number)


def _scientific(value: float | None) -> str:
    """2.3e-3, as the facts write it."""
    return "-" if value is None else re.sub(r"e([+-])0", r"e\1", f"{value:.1e}")


class _Run:
    """The state of one measurement: what still takes part, and what was found."""

    def __init__(
        self,
        case: Case,
        candidates: tuple[Candidate, ...],
        platform: OmniPlatform,
        device: torch.device,
        max_error: float | None,
    ) -> None:
        self.case, self.candidates, self.device = case, candidates, device
        self._platform, self._max_error = platform, max_error
        self._tensors: Tensors = case.tensors(device)
        self._record = case.record(device)
        self._sample = case.sample(device)
        self._expected = case.expected(self._tensors, self._sample)
        self._clock = clock_for(device)
        self._calls: dict[int, Call] = {}
        self._times: dict[int, list[float]] = {}
        self._found: dict[int, Result] = {}

    def accepted(self) -> list[int]:
        """The candidates whose facts take the call; the others are refused with their reasons."""
        for number, candidate in enumerate(self.candidates):
            if not candidate.verdict.accepted:
                self._out(number, "refused", "; ".join(candidate.verdict.reasons))
            elif candidate.needs_video_grid and self.case.grid is None:
                self._out(number, "refused", _NO_GRID)
        return [n for n in range(len(self.candidates)) if n not in self._found]

    def taking_part(self) -> list[int]:
        """The candidates that are timed."""
        return list(self._calls)

    def try_out(self, number: int) -> None:
        """Builds a candidate's layer and looks at the numbers and the memory of its first calls."""
        candidate = self.candidates[number]
        try:
            layer = self.case.layer(candidate.spec.model_copy(update={"fallback": ()}), self._platform)
            prepare_attention(layer, {self.case.request.role: self._record}, self._lengths)
            call: Call = partial(layer, *self._tensors, self._record)
            deviation = self._deviation(call()[:, self._sample])
            self._found[number] = Result(candidate=candidate, status="measured", error=deviation)
            if self._max_error is not None and not deviation <= self._max_error:
                found = f"error {deviation:.1e}, allowed {self._max_error:.1e}"
                self._out(number, "past the error", found, error=deviation)
                return
            peak = peak_bytes(call, self.device)
            self._found[number] = replace(self._found[number], peak_bytes=peak, route=layer.other_route)
        except BackendImportError as error:
            self._out(number, "refused", str(error))
        except Exception as error:
            self._failed(number, error)
        else:
            self._calls[number], self._times[number] = call, []

    def time(self, number: int) -> None:
        """One timed call of a candidate that still takes part."""
        if number not in self._calls:
            return
        try:
            self._times[number].append(self._clock.milliseconds(self._calls[number]))
        except Exception as error:
            self._failed(number, error)

    def result(self, number: int) -> Result:
        """What was found for a candidate."""
        found, times = self._found[number], self._times.get(number)
        if found.status != "measured" or not times:
            return found
        median = statistics.median(times)
        tflops = self.case.operations / median / 1e9
        return replace(found, milliseconds=median, rounds=tuple(times), tflops=tflops)

    @property
    def _lengths(self) -> dict[str, tuple[int, int]]:
        return {self.case.request.role: self.case.lengths}

    def _deviation(self, rows: torch.Tensor) -> float:
        difference = rows.to(self._expected.device).double() - self._expected
        return float(difference.norm() / self._expected.norm())

    def _out(self, number: int, status: Status, reason: str, error: float | None = None) -> None:
        self._found[number] = Result(
            candidate=self.candidates[number], status=status, reason=reason, error=error
        )
        self._calls.pop(number, None)

    def _failed(self, number: int, error: Exception) -> None:
        """A kernel may raise anything; that is a finding about it, and the others are still measured."""
        text = str(error).strip() or "no text"
        if not isinstance(error, OmniAttnError):
            text = f"{type(error).__name__}: {text.splitlines()[0]}"
        self._out(number, "failed", text)
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
