"""The fastest backend within an error bound for each role of a pipeline, measured on the role's own shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from omni_attn.config import AttentionConfig, AttentionSpec, PipelineConfig, TunedFor
from omni_attn.errors import ConfigError
from omni_attn.explain import collect_requests, measured_on
from omni_attn.facts import AttentionRequest
from omni_attn.models.runtime import Progress, no_progress, resolve_dtype
from omni_attn.platforms import OmniPlatform
from omni_attn.tuning.bench import EXTRA_CALLS, ROUNDS
from omni_attn.tuning.candidates import Candidate, candidates_for, every_spec, facts_of
from omni_attn.tuning.cases import Case, case_of_request
from omni_attn.tuning.estimate import check_cost
from omni_attn.tuning.measure import Result, measure

MAX_ERROR = 5e-3
_LOSS = "what that loses is to be judged on a model's own queries and keys (`omni-attn inspect` does)"


@dataclass(frozen=True)
class CaseResults:
    """One kind of call of a role: how many layers make it, and what every candidate did on it."""

    case: Case
    layers: int
    results: tuple[Result, ...]


@dataclass(frozen=True)
class RoleTuning:
    """What was found for one role.

    Attributes:
        calls: usually one; more where layers of the role differ in geometry.
        winner: the spec with the least time over all layers of the role, with the file's fallbacks for it.
    """

    role: str
    calls: tuple[CaseResults, ...]
    winner: AttentionSpec

    def won(self, result: Result) -> bool:
        """Whether a result is the winner's."""
        return result.candidate.spec == self.winner.model_copy(update={"fallback": ()})


@dataclass(frozen=True)
class Tuning:
    """What was found for a pipeline.

    Attributes:
        roles: one for each role that was measured.
        unmeasured: roles that were left as they were, with the reason.
        tuned_for: where it was measured.
        max_error: the bound that held.
    """

    roles: tuple[RoleTuning, ...]
    unmeasured: dict[str, str]
    tuned_for: TunedFor
    max_error: float


def tune(
    config: PipelineConfig,
    platform: OmniPlatform,
    device: torch.device,
    *,
    max_error: float = MAX_ERROR,
    rounds: int = ROUNDS,
    progress: Progress = no_progress,
) -> Tuning:
    """Measures every accepted backend and variant, and what the file chooses now, on each role of a pipeline.

    The model is built on the meta device: its roles, heads and masks are real, its weights are not needed.

    Raises:
        ConfigError: the model or dtype cannot be resolved, a role does not fit this machine, or no backend can run a
            role within the error bound.
    """
    dtype = resolve_dtype(config.dtype, platform.device.kind)
    requests = collect_requests(config, platform, dtype)
    unmeasured = {
        request.role: reason
        for request in requests
        if (reason := _why_unmeasured(config.attention, request, platform)) is not None
    }
    todo = []
    for request, layers in requests.items():
        if request.role in unmeasured:
            continue
        case = case_of_request(request)
        candidates = _without_selecting(
            candidates_for(case.request, platform, _specs(config, case, platform)), platform
        )
        accepted = sum(candidate.verdict.accepted for candidate in candidates)
        check_cost(case, device, accepted * (rounds + EXTRA_CALLS))
        todo.append((case, layers, candidates))
    found = [
        CaseResults(
            case,
            layers,
            measure(
                case, candidates, platform, device, rounds=rounds, max_error=max_error, progress=progress
            ),
        )
        for case, layers, candidates in todo
    ]
    here = measured_on(platform.device, dtype, requests)
    return Tuning(tuple(_decide(found, config.attention, max_error)), unmeasured, here, max_error)


def _why_unmeasured(
    attention: AttentionConfig, request: AttentionRequest, platform: OmniPlatform
) -> str | None:
    """Why a role keeps what it has; None where it is measured."""
    if request.kv_cache is not None:
        return "it attends over pages, whose lengths and tables a seeded call does not have"
    if not (request.max_seqlen_q and request.max_seqlen_k):
        return "the model states no token counts for it"
    own, _ = attention.resolve(request.role, request.role_category)
    facts = None if own is None else facts_of(own.backend, platform)
    if own is None or facts is None or not facts.selects_blocks:
        return None
    if not request.video_grid and not candidates_for(request, platform, (own,))[0].verdict.accepted:
        return None  # it cannot serve the role, and measuring says so
    return f"the file chooses {own.backend}, and {_LOSS}; take it out of the file to have dense backends measured"


def _without_selecting(candidates: Iterable[Candidate], platform: OmniPlatform) -> tuple[Candidate, ...]:
    """The candidates, of which those that select blocks are refused: on seeded tensors one might win by luck."""
    judged = []
    for candidate in candidates:
        facts = facts_of(candidate.spec.backend, platform)
        if candidate.verdict.accepted and facts is not None and facts.selects_blocks:
            refused = replace(candidate.verdict, reasons=(f"selects blocks, and {_LOSS}",))
            candidate = replace(candidate, verdict=refused)
        judged.append(candidate)
    return tuple(judged)


def _specs(config: PipelineConfig, case: Case, platform: OmniPlatform) -> tuple[AttentionSpec, ...]:
    """Every backend and variant, and the file's own choice for the role if it sets more than these two."""
    specs = every_spec(platform)
    own, _ = config.attention.resolve(case.request.role, case.request.role_category)
    if own is None:
        return specs
    alone = own.model_copy(update={"fallback": ()})
    bare = AttentionSpec(backend=own.backend, variant=own.variant)
    if alone == bare and any(spec.backend == own.backend for spec in specs):
        return specs
    return *specs, alone


def _decide(
    found: Iterable[CaseResults], attention: AttentionConfig, max_error: float
) -> Iterator[RoleTuning]:
    by_role: dict[str, list[CaseResults]] = {}
    for results in found:
        by_role.setdefault(results.case.request.role, []).append(results)
    problems = []
    for role, calls in by_role.items():
        times = {
            result.candidate.spec: total
            for result in calls[0].results
            if (total := _total(calls, result.candidate.spec)) is not None
        }
        if not times:
            problems.append(_nothing_text(role, calls, max_error))
            continue
        winner = min(times, key=times.__getitem__)
        own, _ = attention.resolve(role, calls[0].case.request.role_category)
        yield RoleTuning(role, tuple(calls), _with_fallback(winner, own))
    if problems:
        raise ConfigError(*problems)


def _with_fallback(winner: AttentionSpec, own: AttentionSpec | None) -> AttentionSpec:
    """The winner with the fallbacks that the file has for the role: what to do elsewhere was said already."""
    if own is None:
        return winner
    rest = tuple(
        spec for spec in own.fallback if (spec.backend, spec.variant) != (winner.backend, winner.variant)
    )
    return winner.model_copy(update={"fallback": rest}) if rest else winner


def _total(calls: Iterable[CaseResults], spec: AttentionSpec) -> float | None:
    """Time of all layers once; None if the spec was not timed on each call, or gave wrong numbers."""
    total = 0.0
    for call in calls:
        result = next((r for r in call.results if r.candidate.spec == spec), None)
        if result is None or result.milliseconds is None or result.is_broken:
            return None
        total += call.layers * result.milliseconds
    return total


def _nothing_text(role: str, calls: Iterable[CaseResults], max_error: float) -> str:
    reasons = {
        f"{result.label} {result.status}: {result.reason or result.wrong_numbers}"
        for call in calls
        for result in call.results
        if result.status != "measured" or result.is_broken
    }
    return (
        f'role "{role}": no backend here runs it within --max-error {max_error:g}: {"; ".join(sorted(reasons))}. '
        "Allow more error, or install another kernel package."
    )
