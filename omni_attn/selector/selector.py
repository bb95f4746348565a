"""From a request to a Selection: the config's answer, "or platform default", judged, loaded, explained."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_attn.backends import registry
from omni_attn.config import AttentionConfig, AttentionSpec
from omni_attn.errors import ConfigError
from omni_attn.facts import AttentionRequest, DeviceInfo, Verdict
from omni_attn.frozen import FrozenMapping
from omni_attn.platforms import OmniPlatform, current_omni_platform
from omni_attn.selector.scope import as_config, current_scope

if TYPE_CHECKING:
    from omni_attn.backends.abstract import AttentionBackend

PLATFORM_DEFAULT = "platform default"

_log = logging.getLogger("omni_attn")


@dataclass(frozen=True)
class Selection:
    """What was selected for one layer, and why.

    Attributes:
        class_path: qualified path of the backend class.
        backend_cls: the class.
        variant: kernel generation or provider inside the backend, None if it has none.
        spec: the options that hold: the person's spec, or the fallback that was taken; None = platform default.
        source: where the choice comes from ("per_role['self']", "default", "platform default", ...).
        verdicts: one per candidate, in order.
        request: what the layer needs.
        index: which candidate it is; above 0 in a person's own list it is a fallback.
    """

    class_path: str
    backend_cls: type[AttentionBackend]
    variant: str | None
    spec: AttentionSpec | None
    source: str
    verdicts: tuple[Verdict, ...]
    request: AttentionRequest
    index: int = 0

    @property
    def backend(self) -> str:
        """Public name of the backend."""
        return self.backend_cls.get_name()

    @property
    def label(self) -> str:
        """Backend and variant: "FLASH_ATTN (fa3)"."""
        return self.verdicts[self.index].label

    @property
    def is_fallback(self) -> bool:
        """True where the person's first choice was refused and a fallback of theirs runs."""
        return self.spec is not None and self.index > 0

    def reason(self) -> str:
        """Why this one, in a few words: what stood before it and why that cannot run."""
        refused = [str(verdict) for verdict in self.verdicts[: self.index]]
        if refused:
            return "; ".join(refused)
        return "asked for" if self.spec is not None else "first in the default order"

    def explain(self) -> str:
        """The whole answer in lines: the choice, its source, and the verdict on every candidate."""
        head = f'role "{self.request.role}": {self.label}, from {self.source}'
        return "\n".join([head, *(f"  {verdict}" for verdict in self.verdicts)])


def select(
    request: AttentionRequest,
    config: AttentionConfig | Mapping[str, object] | str | None = None,
    platform: OmniPlatform | DeviceInfo | None = None,
    *,
    broken: Mapping[str, str] | None = None,
) -> Selection:
    """Selects the backend of one layer.

    Args:
        request: what the layer needs.
        config: the choice of backends, or anything that load_config takes; None = empty.
        platform: the machine, or facts of one; None = this machine.
        broken: label of a verdict -> why that kernel turned out unusable when it was constructed.

    Raises:
        BackendRejectedError: a person's choice and its fallbacks cannot run here.
        NoBackendError: no default candidate can run here.
        ConfigError: a name that nobody registered.
    """
    spec, label = as_config(config).resolve(request.role, request.role_category)
    source = label or PLATFORM_DEFAULT
    text = None if spec is None else spec.model_dump_json()  # tells True from 1, which == does not
    why = FrozenMapping(broken or {})
    try:
        return _select(
            spec, text, source, request, current_omni_platform(platform), why, registry.generation()
        )
    except ConfigError as error:
        raise ConfigError(f'role "{request.role}": {error} (from {source})') from error


@functools.lru_cache(maxsize=4096)
def _select(
    spec: AttentionSpec | None,
    spec_text: str | None,
    source: str,
    request: AttentionRequest,
    platform: OmniPlatform,
    broken: FrozenMapping[str, str],
    registry_generation: int,
) -> Selection:
    """Keyed by all that can change the answer; the platform carries the device's facts and package set."""
    verdicts = platform.evaluate(spec, request, broken=broken)
    accepted = next((verdict for verdict in verdicts if verdict.accepted), None)
    if accepted is None:
        raise platform.refusal(spec, request, verdicts, source)
    return _selection(accepted, spec, source, request, verdicts)


def _selection(
    accepted: Verdict,
    spec: AttentionSpec | None,
    source: str,
    request: AttentionRequest,
    verdicts: tuple[Verdict, ...],
) -> Selection:
    holding = None if spec is None else (spec, *spec.fallback)[accepted.index]
    backend = registry.load_backend(accepted.class_path, accepted.backend)
    path, variant = accepted.class_path, accepted.variant
    return Selection(path, backend, variant, holding, source, verdicts, request, accepted.index)


def later_fallbacks(selection: Selection, config: AttentionConfig) -> tuple[Selection, ...]:
    """The accepted fallbacks behind a selection, for refusals that only a step can show."""
    spec, source = config.resolve(selection.request.role, selection.request.role_category)
    behind = selection.verdicts[selection.index + 1 :]
    if spec is None:
        return ()
    return tuple(
        _selection(verdict, spec, source or PLATFORM_DEFAULT, selection.request, selection.verdicts)
        for verdict in behind
        if verdict.accepted
    )


def get_attn_backend_for_role(
    role: str | None = None,
    head_size: int | None = None,
    *,
    config: AttentionConfig | Mapping[str, object] | str | None = None,
    role_category: str | None = None,
    platform: OmniPlatform | DeviceInfo | None = None,
    allow_trtllm_default: bool = False,
    request: AttentionRequest | None = None,
) -> tuple[type[AttentionBackend], AttentionSpec | None]:
    """The backend class of a role, and the person's spec; None as spec means that nobody asked for one.

    Nothing is constructed: a package that is installed but broken shows only when a layer is built.

    Args:
        role, head_size, role_category: the layer, where no request is given; head_size -1 = unknown.
        config: None = the config in force.
        platform: None = the platform in force.
        allow_trtllm_default: the model passes no masks: another spelling of mask_usage="never".
        request: the whole request; then the arguments above must be absent.

    Raises:
        TypeError: request together with one of its parts, or neither of them.
        BackendRejectedError, NoBackendError, ConfigError: as select.
    """
    parts: dict[str, Any] = {"role": role, "head_size": head_size, "role_category": role_category}
    parts["allow_trtllm_default"] = allow_trtllm_default or None
    given = [name for name, value in parts.items() if value is not None]
    if request is not None and given:
        raise TypeError(
            f"get_attn_backend_for_role: request= already states {', '.join(given)}; leave them out"
        )
    if request is None:
        if role is None or head_size is None:
            raise TypeError("get_attn_backend_for_role: needs role and head_size, or request=")
        request = AttentionRequest(
            role=role,
            role_category=role_category,
            num_heads=None,
            head_size=head_size,
            mask_usage="never" if allow_trtllm_default else None,
        )
    scope = current_scope()
    chosen = scope.platform_or_current() if platform is None else platform
    selection = select(request, scope.config_for(config), chosen)
    log_selection(selection)
    return selection.backend_cls, selection.spec


_logged: set[tuple[str, str, str]] = set()


def log_selection(selection: Selection) -> None:
    """One start-up line per (role, source, backend); a fallback that was taken is a warning."""
    key = (selection.request.role, selection.source, selection.label)
    if key in _logged:
        return
    _logged.add(key)
    text = 'attention role "%s": %s (source: %s)'
    if selection.is_fallback:
        _log.warning(f"{text}; fallback taken: %s", *_log_words(selection), selection.reason())
    else:
        _log.info(text, *_log_words(selection))


def _log_words(selection: Selection) -> tuple[str, str, str]:
    return selection.request.role, selection.label, selection.source
