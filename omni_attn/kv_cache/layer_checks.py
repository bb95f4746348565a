"""Holds the paged layers of a model against one another, and against the page tables that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omni_attn.facts.kv_cache import KVCacheSpec

if TYPE_CHECKING:
    from omni_attn.kv_cache.layers import PagedLayer


def check_layers(
    layers: Sequence[PagedLayer], specs: Mapping[str, KVCacheSpec], *, batch_invariant: bool
) -> None:
    """What `init_attention_groups` cannot make groups of.

    Raises:
        ValueError, RuntimeError: see there.
    """
    _check_names(layers)
    for layer in layers:
        _check_spec(layer, specs)
        _check_invariance(layer, batch_invariant)
    _check_sharing(layers)


def _check_names(layers: Sequence[PagedLayer]) -> None:
    names = [layer.prefix for layer in layers]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not all(names):
        wrong = f"the name {twice[0]!r} twice" if twice else "a layer without a name"
        raise ValueError(
            f"{wrong} among {len(names)} paged layers: each needs a prefix of its own, since its cache and metadata "
            "are found by it"
        )


def _check_spec(layer: PagedLayer, specs: Mapping[str, KVCacheSpec]) -> None:
    wanted, own = specs.get(layer.cache_group), layer.kv_cache_spec
    if wanted is None:
        raise ValueError(
            f"layer {layer.prefix!r} uses the page table {layer.cache_group!r}, and there are specs for "
            f"{', '.join(map(repr, specs)) or 'none'}: add its own"
        )
    if wanted != own:
        raise ValueError(
            f"layer {layer.prefix!r} keeps {own}, and the page table {layer.cache_group!r} is made for {wanted}: state "
            "both alike, or name another page table (cache_group=)"
        )


def _check_invariance(layer: PagedLayer, batch_invariant: bool) -> None:
    selection = layer.selection
    if selection is None:
        raise ValueError(
            f"layer {layer.prefix!r} only stated its request: nothing was selected, so it cannot run"
        )
    if not (batch_invariant or selection.request.batch_invariant):
        return
    side = selection.backend_cls.facts.side(layer.kv_cache_spec)
    assert side is not None
    kernel = next((v.facts for v in side.variants if v.name == selection.variant), side)
    if not kernel.batch_invariant:
        raise RuntimeError(
            f"batch_invariant mode is not supported by {selection.label} (layer {layer.prefix!r}): choose a backend "
            "whose facts say batch_invariant, or leave the mode out"
        )


def _check_sharing(layers: Sequence[PagedLayer]) -> None:
    """A target may be neither the layer itself, missing, later, without a cache of its own, nor of another kind."""
    places = {layer.prefix: place for place, layer in enumerate(layers)}
    for place, layer in enumerate(layers):
        name = layer.kv_sharing_target
        if name is None:
            continue
        head = f"layer {layer.prefix!r} reads the cache of {name!r}"
        if name == layer.prefix:
            raise ValueError(f"{head}, which is the layer itself: leave kv_sharing_target out")
        if name not in places:
            raise ValueError(f"{head}, and no paged layer has that name; there are {', '.join(places)}")
        target = layers[places[name]]
        if places[name] > place:
            raise ValueError(
                f"{head}, which runs later and has written nothing by then: name an earlier layer"
            )
        if target.kv_sharing_target is not None:
            raise ValueError(f"{head}, which keeps none of its own: name {target.kv_sharing_target!r}")
        here, there = (
            (member.kv_cache_spec.kind, member.cache_group, member.kv_cache_spec)
            for member in (layer, target)
        )
        if here[0] != there[0]:
            raise ValueError(
                f"{head}, whose type is {there[0]}, and its own is {here[0]}: they have to be equal"
            )
        if here[1:] != there[1:]:
            raise ValueError(
                f"{head}, which has page table {there[1]!r} with {there[2]}, and its own is {here[1]!r} with {here[2]}"
                ": state the same cache_group and kv_cache for both"
            )
