"""attention_report: which kernel each attention role of a built model runs, and why."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from omni_attn.kv_cache.layers import PagedLayer
from omni_attn.layer import Attention
from omni_attn.selector import Selection


@dataclass(frozen=True)
class ReportRow:
    """Layers of one role that run the same way.

    Attributes:
        role, role_category: their labels.
        layers: how many; names: their names in the model.
        backend, variant: what was selected ("custom_attention" for a module of the model's own).
        impl: class that runs, a fallback's if one was taken.
        source: where the choice comes from.
        reason: why this candidate, or why a fallback.
        route: what was prepared last, the selected backend or a fallback.
        fallbacks_taken: how many preparations took a fallback.
        routes_taken: how many preparations took each route.
        parallel: what the ranks do with the sequence, None in one process.
    """

    role: str
    role_category: str | None
    layers: int
    backend: str
    variant: str | None
    impl: str
    source: str
    reason: str
    route: str
    fallbacks_taken: int
    routes_taken: dict[str, int]
    names: tuple[str, ...]
    parallel: str | None = None

    @property
    def counts(self) -> str:
        """How often each route was prepared, where there was more than one; else empty."""
        if len(self.routes_taken) < 2:
            return ""
        counted = (f"{route} {count} time{'s' * (count > 1)}" for route, count in self.routes_taken.items())
        return f"prepared: {', '.join(counted)}"


@dataclass(frozen=True)
class AttentionReport:
    """One row per role and way of running."""

    rows: tuple[ReportRow, ...]

    def __iter__(self) -> Iterator[ReportRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {"roles": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        return "\n".join(
            f'role "{row.role}" ({row.layers} layers): {row.route}, from {row.source}; '
            + "; ".join(filter(None, (row.reason, row.counts, row.parallel)))
            for row in self.rows
        )


def attention_report(model: nn.Module) -> AttentionReport:
    """What the attention layers of a model run, one row per role and way of running, in order of appearance."""
    groups: dict[tuple[object, ...], list[tuple[str, Any]]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Attention):
            source = layer.selection.source if layer.selection else "model"
            groups.setdefault((layer.role, layer.group_id, source, layer.route), []).append((name, layer))
        elif isinstance(layer, PagedLayer) and layer.selection is not None:
            kind = (layer.selection.request.role, layer.group_key, layer.selection.source, layer.cache_group)
            groups.setdefault(kind, []).append((name, layer))
    return AttentionReport(
        tuple(
            _row(members) if isinstance(members[0][1], Attention) else _paged_row(members)
            for members in groups.values()
        )
    )


def _paged_row(members: list[tuple[str, PagedLayer]]) -> ReportRow:
    """Its steps are prepared for a group at a time, outside of the layer, so that it counts no routes."""
    layer = members[0][1]
    selection = layer.selection
    assert selection is not None
    pages = layer.kv_cache_spec.block_size
    return ReportRow(
        role=selection.request.role,
        role_category=selection.request.role_category,
        layers=len(members),
        backend=selection.backend,
        variant=selection.variant,
        impl=type(layer.impl).__qualname__,
        source=selection.source,
        reason=f"{selection.reason()}; page table {layer.cache_group!r}, pages of {pages} tokens",
        route=f"{selection.label}, paged",
        fallbacks_taken=0,
        routes_taken={},
        names=tuple(name for name, _ in members),
    )


def _row(members: list[tuple[str, Attention]]) -> ReportRow:
    layer = members[0][1]
    active = layer.active_route
    common: dict[str, Any] = {
        "role": layer.role,
        "role_category": layer.role_category,
        "layers": len(members),
        "route": layer.route,
        "fallbacks_taken": max(member.fallbacks_taken for _, member in members),
        "routes_taken": dict(functools.reduce(operator.or_, (member.routes_taken for _, member in members))),
        "names": tuple(name for name, _ in members),
        "parallel": layer.parallel,
    }
    if active is None:
        own = layer.custom_attention
        reason = (
            "the layer only stated its request"
            if own is None
            else "the model brings its own attention module"
        )
        return ReportRow(
            **common,
            backend=layer.group_id,
            variant=None,
            impl="-" if own is None else type(own).__qualname__,
            source="model",
            reason=reason,
        )
    selection = layer.selection
    assert selection is not None
    return ReportRow(
        **common,
        backend=selection.backend,
        variant=selection.variant,
        impl=type(active.impl).__qualname__,
        source=selection.source,
        reason=_reason(layer, selection),
    )


def _reason(layer: Attention, selection: Selection) -> str:
    chosen = layer.fallback_reason or selection.reason()
    return chosen if layer.route_reason is None else f"{chosen}; {layer.route_reason}"
