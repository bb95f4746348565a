"""From a request to constructed impls: the selected one, and the fallbacks a person declared behind it."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from omni_attn.config.names import canonical_name
from omni_attn.errors import BackendImportError
from omni_attn.facts import AttentionRequest, KernelFacts
from omni_attn.parallel.runner import ParallelBuilder, ParallelImpl
from omni_attn.parallel.strategy import Strategy
from omni_attn.parallel.views import OWN
from omni_attn.selector import Selection, later_fallbacks, log_selection, select

if TYPE_CHECKING:
    from omni_attn.backends.abstract import AttentionImpl, AttentionMetadataBuilder
    from omni_attn.config import AttentionConfig
    from omni_attn.platforms import OmniPlatform

Built = TypeVar("Built")

_log = logging.getLogger("omni_attn")
_passed_over: set[tuple[str, str]] = set()


@dataclass(frozen=True, eq=False)
class Route:
    """One way a layer can run: a selection with its constructed impl and builder.

    Attributes:
        called: what the layer calls: the impl, or the exchanges between ranks around it.
        prepares: what is asked for M: the builder, or one that prepares the impl for each of a rank's calls.
        split: how the layer is split over ranks, None = it is not.
    """

    selection: Selection
    impl: AttentionImpl
    builder: AttentionMetadataBuilder
    called: AttentionImpl | ParallelImpl
    prepares: AttentionMetadataBuilder | ParallelBuilder
    split: Strategy | None = None

    @property
    def label(self) -> str:
        """Role, backend and variant, to head an error text."""
        return f'role "{self.selection.request.role}": {self.selection.label}'

    @property
    def facts(self) -> KernelFacts:
        """Limits of the variant that runs."""
        return _facts_of(self.selection)

    @property
    def layer_inputs(self) -> frozenset[str]:
        """Names of the per-layer tensors that the impl reads."""
        return self.selection.backend_cls.facts.layer_inputs


def build_routes(
    request: AttentionRequest,
    config: AttentionConfig,
    platform: OmniPlatform,
    overrides: Mapping[str, type[AttentionImpl]],
    split: Strategy | None,
) -> tuple[Route, ...]:
    """The selected route first, then one per accepted fallback.

    A package that turns out broken here is one more refusal: of a platform default, or of a choice with a fallback
    behind it, the next candidate is built; any other choice raises.

    Raises:
        BackendImportError, and what select raises; TypeError for an override of the wrong class.
    """
    first = construct_selected(
        request, config, platform, lambda chosen: _build_route(chosen, overrides, split)
    )
    behind = later_fallbacks(first.selection, config)
    return (first, *(route for later in behind if (route := _build_fallback(later, overrides, split))))


def construct_selected(
    request: AttentionRequest,
    config: AttentionConfig,
    platform: OmniPlatform,
    construct: Callable[[Selection], Built],
) -> Built:
    """What `construct` makes of the selection, or of the next one where a package turns out broken; see build_routes.

    Raises:
        BackendImportError, and what select raises.
    """
    broken: dict[str, str] = {}
    while True:
        selection = select(request, config, platform, broken=broken)
        try:
            built = construct(selection)
        except BackendImportError as error:
            if selection.spec is not None and not later_fallbacks(selection, config):
                raise BackendImportError(f'role "{request.role}": {error}') from error
            broken[selection.label] = str(error).removeprefix(f"{selection.label}: ")
            _log_passed_over(selection, error)
            continue
        log_selection(selection)
        return built


def _build_fallback(
    selection: Selection, overrides: Mapping[str, type[AttentionImpl]], split: Strategy | None
) -> Route | None:
    try:
        return _build_route(selection, overrides, split)
    except BackendImportError as error:
        _log_passed_over(selection, error)
        return None


def _log_passed_over(selection: Selection, error: BackendImportError) -> None:
    key = (selection.request.role, str(error))
    if key not in _passed_over:
        _passed_over.add(key)
        _log.warning('attention role "%s", passed over: %s', *key)


def _build_route(
    selection: Selection, overrides: Mapping[str, type[AttentionImpl]], split: Strategy | None
) -> Route:
    impl_cls = overriding_class(selection, selection.backend_cls.get_impl_cls(), overrides)
    builder_cls = impl_cls.builder_cls or selection.backend_cls.get_builder_cls()

    def construct(**changed: Any) -> tuple[AttentionImpl, AttentionMetadataBuilder]:
        geometry = geometry_of(selection) | changed
        return impl_cls(**geometry), _construct_builder(builder_cls, geometry)

    if split is None:
        impl, builder = construct()
        return Route(selection, impl, builder, impl, builder)
    # The request object of the layer itself: compiled code then sees that equal layers are equal.
    split = split.holding(selection.request)
    built = {name: construct(**changed) for name, changed in split.geometries().items()}
    impls = {name: impl for name, (impl, _) in built.items()}
    builders = {name: builder for name, (_, builder) in built.items()}
    called = ParallelImpl(split, impls, lse_backward=_facts_of(selection).lse_backward)
    prepares = ParallelBuilder(split, builders)
    return Route(selection, impls[OWN], builders[OWN], called, prepares, split)


def _facts_of(selection: Selection) -> KernelFacts:
    facts = selection.backend_cls.facts
    return next((v.facts for v in facts.variants if v.name == selection.variant), facts)


def geometry_of(selection: Selection) -> dict[str, Any]:
    """The keywords that builders and impls are constructed with, see LayerGeometry."""
    request = selection.request
    geometry: dict[str, Any] = {
        "num_heads": request.num_heads,
        "num_kv_heads": request.num_kv_heads,
        "head_size": request.head_size,
        "softmax_scale": request.head_size**-0.5 if request.softmax_scale is None else request.softmax_scale,
        "causal": request.causal,
        "spec": selection.spec,
        "variant": selection.variant,
    }
    # What an impl that knows only the seven above need not hear of.
    if request.window is not None:
        geometry["window"] = request.window
    if request.value_head_size != request.head_size:
        geometry["value_head_size"] = request.value_head_size
    return geometry


def _construct_builder(builder_cls: type[Built], geometry: Mapping[str, Any]) -> Built:
    """A builder may have a constructor of its own that takes only part of the geometry."""
    parameters = inspect.signature(builder_cls.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return builder_cls(**geometry)
    return builder_cls(**{name: value for name, value in geometry.items() if name in parameters})


def overriding_class(
    selection: Selection, selected: type[Built], overrides: Mapping[str, type[Any]]
) -> type[Built]:
    """The model's own class for the selected backend, else the selected one.

    Raises:
        TypeError: it does not subclass the one that it replaces.
    """
    override = overrides.get(canonical_name(selection.backend))
    if override is None:
        return selected
    if not (isinstance(override, type) and issubclass(override, selected)):
        raise TypeError(
            f"impl_overrides[{selection.backend!r}] = {getattr(override, '__qualname__', override)!r} must subclass "
            f"the selected implementation {selected.__qualname__}"
        )
    return override


def served_dtypes(route: Route, platform: OmniPlatform) -> tuple[str, ...]:
    """The dtypes in which the selected variant serves its layer; build flags and options count, beside the facts."""
    selection, device = route.selection, platform.device
    served = []
    for dtype in sorted(route.facts.dtypes):
        asked = (replace(selection.request, dtype=dtype), device, selection.spec)
        reasons = selection.backend_cls.validate_configuration(*asked)
        if not reasons and selection.backend_cls.select_variant(*asked) == selection.variant:
            served.append(dtype)
    return tuple(served)


def canonical_overrides(
    overrides: Mapping[Any, type[Built]] | None,
) -> dict[str, type[Built]]:
    """Overrides by public name; keys may be names in any case, or members of DiffusionAttentionBackendEnum."""
    return {canonical_name(getattr(name, "name", name)): cls for name, cls in (overrides or {}).items()}


def layer_index_of(prefix: str) -> int | None:
    """The first part of a layer's dotted name that is a whole number, None without one: 12 of "blocks.12.attn1"."""
    return next((int(part) for part in prefix.split(".") if part.isascii() and part.isdigit()), None)


def group_name(routes: tuple[Route, ...]) -> str:
    """A string that is equal for layers which share what a builder prepares.

    Backend, variant, impl class, spec, geometry and the builder's own key of every route count. A string, since
    torch.compile cannot trace specs as dictionary keys.
    """
    parts: list[object] = []
    for route in routes:
        selection, impl_cls, spec = route.selection, type(route.impl), route.selection.spec
        request = selection.request
        parts += [selection.class_path, selection.variant, impl_cls.__qualname__, id(impl_cls)]
        parts += [request.num_heads, request.num_kv_heads, request.head_size, request.value_head_size]
        parts += [request.softmax_scale, request.causal, request.window]
        parts += [None if route.split is None else route.split.key]
        parts += [
            None if spec is None else spec.model_dump_json(),
            getattr(route.builder, "group_key", None),
        ]
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    return f"{routes[0].selection.backend}:{type(routes[0].impl).__name__}:{digest}"
