"""From the CUDA-graph mode that a person asks for to the one that a model's attention backends support."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from omni_attn.errors import ConfigError
from omni_attn.facts.kv_cache import AttentionCGSupport
from omni_attn.kv_cache.cudagraph import CUDAGraphMode, LoweringStep, ModeDecision

_log = logging.getLogger("omni_attn")


def resolve_cudagraph_mode(
    requested: CUDAGraphMode | str | None,
    supports: Mapping[str, AttentionCGSupport],
    *,
    attention_is_splitting_op: bool,
    compiled: bool = True,
    uniform_query_len: int = 1,
    piecewise_available: bool = True,
    strict: bool = False,
    layers: Mapping[str, Sequence[str]] | None = None,
) -> ModeDecision:
    """The mode that a model's backends support, as near to the requested one as can be. Logs a warning per lowering.

    Args:
        requested: a mode or its name; None = NONE.
        supports: backend name -> what its graphs can serve; the lowest decides. Empty = nothing limits the mode.
        attention_is_splitting_op: a compiled model is split at all its attention calls.
        compiled: the model is compiled, so that it can be split.
        uniform_query_len: query tokens of each request in a uniform batch.
        piecewise_available: whoever captures can capture pieces.
        strict: a lowering is an error.
        layers: backend name -> names of its layers, for the record and the texts.

    Raises:
        ConfigError: the name is unknown; FULL is asked of a backend without graphs; something was lowered under
            `strict`.
        ValueError: uniform_query_len is not positive.
    """
    if uniform_query_len < 1:
        raise ValueError(f"uniform_query_len={uniform_query_len}: a uniform batch has at least 1 query token")
    asked = mode = CUDAGraphMode.of(requested)
    weakest = _Weakest.of(supports, layers or {})
    model = _Model(weakest, attention_is_splitting_op, compiled, uniform_query_len, piecewise_available)
    steps = list[LoweringStep]()
    for rule in _RULES:
        if (step := rule(mode, model)) is not None:
            steps.append(step)
            mode = step.after
    assert not (mode.has_full_cudagraphs() and weakest.support is AttentionCGSupport.NEVER)
    decision = ModeDecision(asked, mode, tuple(steps))
    if any(step.by_backend for step in steps):
        decision = ModeDecision(asked, mode, tuple(steps), weakest.name, weakest.support, weakest.layers)
    if strict and decision.lowered:
        raise ConfigError(
            f"{decision}\na strict cudagraph_mode is never lowered -- ask for {mode.name}, or choose a backend "
            "with more support"
        )
    for step in steps:
        _log.warning("%s", step)
    return decision


@dataclass(frozen=True)
class _Weakest:
    """The backend that decides."""

    names: tuple[str, ...] = ()
    support: AttentionCGSupport = AttentionCGSupport.ALWAYS
    name: str = ""
    layers: tuple[str, ...] = ()

    @classmethod
    def of(cls, supports: Mapping[str, AttentionCGSupport], layers: Mapping[str, Sequence[str]]) -> _Weakest:
        if not supports:
            return cls()
        name = min(supports, key=lambda name: supports[name])  # of equal ones the first
        return cls(tuple(supports), AttentionCGSupport(supports[name]), name, tuple(layers.get(name, ())))

    def refuses(self, mode: CUDAGraphMode) -> str:
        shown = ", ".join(self.layers[:3]) + (", ..." if len(self.layers) > 3 else "")
        layers = f"; {len(self.layers)} layer(s): {shown}" if self.layers else ""
        return (
            f"CUDAGraphMode.{mode.name} is not supported with {self.name} backend "
            f"(support: {self.support.name}{layers})"
        )


@dataclass(frozen=True)
class _Model:
    weakest: _Weakest
    splits: bool
    compiled: bool
    query_len: int
    piecewise_available: bool


def _full_of_mixed_batches(mode: CUDAGraphMode, model: _Model) -> LoweringStep | None:
    weakest = model.weakest
    if mode.mixed_mode() is not CUDAGraphMode.FULL or weakest.support is AttentionCGSupport.ALWAYS:
        return None
    if weakest.support is AttentionCGSupport.NEVER:
        raise ConfigError(
            f"{weakest.refuses(mode)} -- it serves no batch from a graph -- set cudagraph_mode to PIECEWISE and "
            "compile the model with its attention calls as splitting ops, set it to NONE, or choose another backend"
        )
    reason = f"{weakest.refuses(mode)} for batches whose query lengths differ"
    if model.splits:
        return LoweringStep(mode, CUDAGraphMode.FULL_AND_PIECEWISE, reason)
    reason += ", and attention is not a splitting op"
    return LoweringStep(mode, CUDAGraphMode.FULL_DECODE_ONLY, reason)


def _full_without_support(mode: CUDAGraphMode, model: _Model) -> LoweringStep | None:
    weakest = model.weakest
    if mode.decode_mode() is not CUDAGraphMode.FULL or weakest.support is not AttentionCGSupport.NEVER:
        return None
    reason = f"{weakest.refuses(mode)} for any batch"
    if model.compiled and model.splits:
        return LoweringStep(mode, CUDAGraphMode.PIECEWISE, reason)
    lacking = "attention is not a splitting op" if model.compiled else "the model is not compiled"
    return LoweringStep(mode, CUDAGraphMode.NONE, f"{reason}, and {lacking}")


def _full_of_several_tokens(mode: CUDAGraphMode, model: _Model) -> LoweringStep | None:
    weakest = model.weakest
    enough = model.query_len == 1 or weakest.support >= AttentionCGSupport.UNIFORM_BATCH
    if mode.decode_mode() is not CUDAGraphMode.FULL or enough:
        return None
    reason = f"{weakest.refuses(mode)} for {model.query_len} query tokens per request"
    if model.splits:
        return LoweringStep(mode, CUDAGraphMode.PIECEWISE, reason)
    return LoweringStep(mode, CUDAGraphMode.NONE, f"{reason}, and attention is not a splitting op")


def _pieces_without_capture(mode: CUDAGraphMode, model: _Model) -> LoweringStep | None:
    if model.piecewise_available or not mode.requires_piecewise_compilation():
        return None
    names = ", ".join(model.weakest.names) or "any backend"
    reason = (
        f"CUDAGraphMode.{mode.name} is not supported with {names}: pieces of a model are not captured here"
    )
    return LoweringStep(mode, mode.without_piecewise(), reason, by_backend=False)


#: In this order; each sees the mode that the ones before left.
_RULES: tuple[Callable[[CUDAGraphMode, _Model], LoweringStep | None], ...] = (
    _full_of_mixed_batches,
    _full_without_support,
    _full_of_several_tokens,
    _pieces_without_capture,
)
