"""Which backends and variants there are to measure, and which of them one call is refused by, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omni_attn.backends.registry import load_backend, registered_names, unknown_name_text
from omni_attn.config import AttentionSpec
from omni_attn.config.names import canonical_name, nearest
from omni_attn.errors import BackendImportError, ConfigError, OmniAttnError
from omni_attn.facts import AttentionRequest, BackendFacts, Verdict
from omni_attn.platforms import OmniPlatform


@dataclass(frozen=True)
class Candidate:
    """One backend or variant for one call.

    Attributes:
        spec: what a person would write for it.
        verdict: accepted, or the reasons why not.
        numerics: "exact", "quantised" or "approximate"; None where its class cannot be loaded.
        needs_video_grid: it runs only where the (T, H, W) grid of the tokens is known.
        documented: documented relative error in bfloat16, None if the facts give none.
    """

    spec: AttentionSpec
    verdict: Verdict
    numerics: str | None
    documented: float | None
    needs_video_grid: bool = False

    @property
    def label(self) -> str:
        """Backend and variant: "FLASH_ATTN (fa3)"; options are told apart by the word "configured"."""
        bare = AttentionSpec(backend=self.spec.backend, variant=self.spec.variant)
        same = self.spec.model_copy(update={"fallback": ()}) == bare
        return self.verdict.label if same else f"{self.verdict.label}, configured"


def every_spec(platform: OmniPlatform) -> tuple[AttentionSpec, ...]:
    """A spec for each registered backend, or for each of its variants."""
    return tuple(spec for name in registered_names() for spec in _specs_of(name, platform))


def specs_named(words: Iterable[str], platform: OmniPlatform) -> tuple[AttentionSpec, ...]:
    """The specs of words like "TORCH_SDPA" (all its variants) and "FLASH_ATTN:fa3".

    Raises:
        ConfigError: a name or variant that does not exist; all of them at once.
    """
    specs: list[AttentionSpec] = []
    problems: list[str] = []
    for word in words:
        name, colon, variant = word.partition(":")
        try:
            name = canonical_name(name)
            if name not in registered_names():
                raise ConfigError(unknown_name_text(name))
            found = _specs_of(name, platform)
            if colon:
                found = (_variant_of(name, variant, found),)
        except ConfigError as error:
            problems.append(str(error))
            continue
        specs += [spec for spec in found if spec not in specs]
    if problems:
        raise ConfigError(*problems)
    return tuple(specs)


def candidates_for(
    request: AttentionRequest, platform: OmniPlatform, specs: Iterable[AttentionSpec]
) -> tuple[Candidate, ...]:
    """Each spec, judged for a request on a platform."""
    return tuple(_judged(spec, request, platform) for spec in specs)


def _specs_of(name: str, platform: OmniPlatform) -> tuple[AttentionSpec, ...]:
    facts = facts_of(name, platform)
    variants: list[str | None] = [] if facts is None else [variant.name for variant in facts.variants]
    return tuple(AttentionSpec(backend=name, variant=variant) for variant in variants or [None])


def facts_of(name: str, platform: OmniPlatform) -> BackendFacts | None:
    """The facts of a registered backend on a platform; None where its class cannot be loaded."""
    try:
        return load_backend(platform.class_path(name), name).facts
    except (BackendImportError, ConfigError):
        return None


def documented_error(facts: BackendFacts) -> float | None:
    """The documented relative error as a number; None if the facts give none that can be read."""
    try:
        return None if facts.error is None else float(facts.error)
    except ValueError:
        return None


def _variant_of(name: str, variant: str, specs: tuple[AttentionSpec, ...]) -> AttentionSpec:
    known = [spec.variant for spec in specs if spec.variant]
    for spec in specs:
        if spec.variant == variant:
            return spec
    near = nearest(variant, known)
    hint = f" Did you mean {near}?" if near else ""
    listed = f"Variants: {', '.join(known)}." if known else f"It has none: write {name}."
    raise ConfigError(f"{name} has no variant {variant!r}.{hint} {listed}")


def _judged(spec: AttentionSpec, request: AttentionRequest, platform: OmniPlatform) -> Candidate:
    alone = spec.model_copy(update={"fallback": ()})
    try:
        (verdict,) = platform.evaluate(alone, request)
    except OmniAttnError as error:  # a plug-in that leads to no class, say: a reason against itself alone
        verdict = Verdict(spec.backend, "", spec.variant, reasons=(str(error),))
    facts = facts_of(spec.backend, platform)
    if facts is None:
        return Candidate(spec, verdict, None, None)
    return Candidate(spec, verdict, facts.numerics, documented_error(facts), facts.needs_video_grid)
