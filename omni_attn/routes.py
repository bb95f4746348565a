"""From a request to constructed impls: the selected one, and the fallbacks a person declared behind it."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omni_attn.backends.metadata import BINDING_FIELDS, AttentionMetadata, Prepared
from omni_attn.config.names import canonical_name
from omni_attn.errors import BackendImportError, MetadataError
from omni_attn.facts import AttentionRequest, KernelFacts
from omni_attn.selector import Selection, later_fallbacks, log_selection, select

if TYPE_CHECKING:
    from omni_attn.backends.abstract import AttentionImpl, AttentionMetadataBuilder
    from omni_attn.config import AttentionConfig
    from omni_attn.platforms import OmniPlatform

_log = logging.getLogger("omni_attn")


@dataclass(frozen=True, eq=False)
class Route:
    """One way a layer can run: a selection with its constructed impl and builder."""

    selection: Selection
    impl: AttentionImpl
    builder: AttentionMetadataBuilder

    @property
    def facts(self) -> KernelFacts:
        """Limits of the variant that runs."""
        facts = self.selection.backend_cls.facts
        return next((v.facts for v in facts.variants if v.name == self.selection.variant), facts)


def build_routes(
    request: AttentionRequest,
    config: AttentionConfig,
    platform: OmniPlatform,
    overrides: Mapping[str, type[AttentionImpl]],
) -> tuple[Route, ...]:
    """The selected route first, then one per accepted fallback.

    A package that turns out broken here is one more refusal: of a platform default, or of a choice with a fallback
    behind it, the next candidate is built; any other choice raises.

    Raises:
        BackendImportError, and what select raises; TypeError for an override of the wrong class.
    """
    broken: dict[str, str] = {}
    while True:
        selection = select(request, config, platform, broken=broken)
        behind = later_fallbacks(selection, config)
        try:
            first = _build_route(selection, overrides)
        except BackendImportError as error:
            if selection.spec is not None and not behind:
                raise BackendImportError(f'role "{request.role}": {error}') from error
            broken[selection.label] = str(error)
            continue
        log_selection(selection)
        return (first, *(route for later in behind if (route := _build_fallback(later, overrides))))


def _build_fallback(selection: Selection, overrides: Mapping[str, type[AttentionImpl]]) -> Route | None:
    try:
        return _build_route(selection, overrides)
    except BackendImportError as error:
        _log.warning('attention role "%s": fallback not available: %s', selection.request.role, error)
        return None


def _build_route(selection: Selection, overrides: Mapping[str, type[AttentionImpl]]) -> Route:
    request, backend = selection.request, selection.backend_cls
    impl_cls = _impl_class(selection, overrides)
    builder_cls = impl_cls.builder_cls or backend.get_builder_cls()
    assert request.num_heads is not None and request.num_kv_heads is not None
    geometry: dict[str, Any] = {
        "num_heads": request.num_heads,
        "num_kv_heads": request.num_kv_heads,
        "head_size": request.head_size,
        "softmax_scale": request.head_size**-0.5 if request.softmax_scale is None else request.softmax_scale,
        "causal": request.causal,
        "spec": selection.spec,
        "variant": selection.variant,
        "window": request.window,
        "value_head_size": request.value_head_size,
    }
    return Route(selection, impl_cls(**geometry), builder_cls(**geometry))


def _impl_class(selection: Selection, overrides: Mapping[str, type[AttentionImpl]]) -> type[AttentionImpl]:
    selected = selection.backend_cls.get_impl_cls()
    override = {canonical_name(name): cls for name, cls in overrides.items()}.get(selection.backend)
    if override is None:
        return selected
    if not (isinstance(override, type) and issubclass(override, selected)):
        raise TypeError(
            f"impl_overrides[{selection.backend!r}] = {getattr(override, '__qualname__', override)!r} must subclass "
            f"the selected implementation {selected.__qualname__}"
        )
    return override


def group_name(routes: tuple[Route, ...]) -> str:
    """A string that is equal for layers which share what a builder prepares.

    Backend, variant, impl class, spec and geometry of every route count. A string, since torch.compile cannot trace
    specs as dictionary keys.
    """
    parts = []
    for route in routes:
        impl, spec = route.impl, route.selection.spec
        cls = type(impl)
        parts.append(
            (
                *(route.selection.class_path, route.selection.variant, cls.__qualname__, id(cls)),
                *(
                    impl.num_heads,
                    impl.num_kv_heads,
                    impl.head_size,
                    impl.value_head_size,
                    impl.softmax_scale,
                ),
                *(impl.causal, impl.window, None if spec is None else spec.model_dump_json()),
            )
        )
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    return f"{routes[0].selection.backend}:{type(routes[0].impl).__name__}:{digest}"


def build_prepared(
    routes: tuple[Route, ...], record: AttentionMetadata, lengths: tuple[int, int]
) -> Prepared:
    """What the first route that can express the record makes of it.

    Raises:
        MetadataError: the first route's refusal, if none can.
    """
    refusals: list[MetadataError] = []
    for index, route in enumerate(routes):
        try:
            product = _build_product(route, record, lengths)
        except MetadataError as error:
            refusals.append(error)
            continue
        if index:
            _log_fallback(route, refusals[0])
        mask = record.attn_mask if record.mask_mode != "none" else None
        packed = record.cu_seqlens_q is not None or record.packed_padding is not None
        broadcast = mask is not None and mask.dim() == 4 and mask.shape[0] == 1
        return Prepared(
            product=product,
            lengths=lengths,
            route=index,
            reads=route.builder.reads,
            mask_batch=1 if packed else None if mask is None or broadcast else mask.shape[0],
            mask_device=None if mask is None else mask.device,
        )
    raise refusals[0]


def build_product(
    builder: AttentionMetadataBuilder, record: AttentionMetadata, lengths: tuple[int, int]
) -> object:
    """What a builder makes of a record, none of whose binding fields it may overlook.

    Raises:
        MetadataError: the record states what the builder does not read, or cannot express.
    """
    unread = record.stated & BINDING_FIELDS - builder.reads
    if record.hides_nothing:
        unread -= {"attn_mask"}
    if unread:
        raise MetadataError(
            f"cannot honour {', '.join(sorted(unread))}; TORCH_SDPA does: choose it for this role, or add it as "
            "fallback"
        )
    return builder.build(record, lengths)


def _build_product(route: Route, record: AttentionMetadata, lengths: tuple[int, int]) -> object:
    request, backend = route.selection.request, route.selection.label
    where = f'role "{request.role}": {backend}'
    if request.mask_usage == "never" and not record.hides_nothing:
        raise MetadataError(f'{where}: the layer said mask_usage="never", and a record with attn_mask came')
    mask = record.attn_mask
    if mask is not None and mask.dim() == 4 and mask.shape[1] not in (1, request.num_heads):
        raise MetadataError(f"{where}: attn_mask has {mask.shape[1]} heads, the layer {request.num_heads}")
    try:
        return build_product(route.builder, record, lengths)
    except MetadataError as error:
        raise MetadataError(f"{where}: {error}") from error


_logged_fallbacks: set[tuple[str, str, str]] = set()


def _log_fallback(route: Route, refusal: MetadataError) -> None:
    key = (route.selection.request.role, route.selection.label, str(refusal))
    if key not in _logged_fallbacks:
        _logged_fallbacks.add(key)
        _log.warning('attention role "%s": fallback %s taken for this step: %s', *key)
