"""Attention groups: the paged layers that share what a builder makes of a step.

Layers with a page table in common form a cache group; those of its layers that have backend, variant, geometry and
whatever else changes the builder's product in common form an attention group, which builds once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from omni_attn.backends.paged import CommonAttentionMetadata, PagedMetadataBuilder
from omni_attn.errors import MetadataError
from omni_attn.facts.kv_cache import AttentionCGSupport, CacheFacts, KVCacheSpec
from omni_attn.kv_cache.kernel_blocks import map_to_kernel_blocks, select_common_block_size
from omni_attn.kv_cache.layer_checks import check_layers
from omni_attn.kv_cache.layers import PagedLayer

if TYPE_CHECKING:
    from omni_attn.selector import Selection


# Methods of an impl that a captured graph holds.
_RUNS = frozenset({"forward", "attend", "forward_mqa", "forward_mha", "attend_ragged", "update_kv_cache"})


@dataclass
class _Built:
    """What one builder made last: (of what, its contents_key, M), exchanged as one so that threads see all or none."""

    last: tuple[CommonAttentionMetadata, tuple[object, ...], Any] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionGroup:
    """Layers that get the same metadata object, and the builders that make it.

    Attributes:
        group_id: unique among the groups of a model, for error texts and tables.
        cache_group: name of the page table.
        layer_names: its layers, in order; sharing: those of them that read another layer's cache -> that layer.
        selection: of its first layer; the others have the same backend, variant and options.
        kv_cache_spec: with the page size of the page table; kernel_spec: with that of the kernels.
        causal: the layers' own statement.
        builders: one per micro-batch.
        impl_cls: of its layers; None = the backend's own.
        key: what tells it from other groups.
    """

    group_id: str
    cache_group: str
    layer_names: tuple[str, ...]
    sharing: Mapping[str, str]
    selection: Selection
    kv_cache_spec: KVCacheSpec
    kernel_spec: KVCacheSpec
    causal: bool
    builders: tuple[PagedMetadataBuilder, ...]
    impl_cls: type[Any] | None = None
    key: tuple[object, ...]
    built: tuple[_Built, ...] = field(repr=False)

    @property
    def block_ratio(self) -> int:
        """Pages of the kernel that make up one page of the table."""
        return self.kv_cache_spec.block_size // self.kernel_spec.block_size

    @property
    def cache_facts(self) -> CacheFacts:
        """What the selected kernel takes."""
        return self.selection.backend_cls.get_cache_facts(self.selection.variant, self.kernel_spec.kind)

    @property
    def cudagraph_support(self) -> AttentionCGSupport:
        """Which batches one captured CUDA graph of its kernel serves, see graph_support."""
        backend, latents = self.selection.backend_cls, self.kernel_spec.kind == "mla"
        own: type[Any] = backend.get_mla_impl_cls() if latents else backend.get_paged_impl_cls()
        return graph_support(self.cache_facts.cudagraph, self.impl_cls or own, own)

    def builder(self, ubatch: int = 0) -> PagedMetadataBuilder:
        """The builder of a micro-batch.

        Raises:
            ValueError: the group was made for fewer of them.
        """
        if not 0 <= ubatch < len(self.builders):
            raise ValueError(
                f"micro-batch {ubatch} of group {self.group_id}: it has {len(self.builders)}; state num_ubatches in "
                "init_attention_groups"
            )
        return self.builders[ubatch]

    def for_kernel(
        self, common: CommonAttentionMetadata, ubatch: int = 0, *, capture: bool = False
    ) -> CommonAttentionMetadata:
        """The step with pages of the kernel's size; slots stay what they are, since a page's parts lie in a row.

        Args:
            capture: the table goes where a CUDA graph reads it.
        """
        if self.block_ratio == 1:
            return common
        table = map_to_kernel_blocks(common.block_table, self.block_ratio)
        if capture:
            table = self.builder(ubatch).buffers.stage("kernel block table", table)
        return replace(common, block_table=table)

    def check(self, common: CommonAttentionMetadata) -> None:
        """Holds a step against what the selected kernel can do.

        Raises:
            MetadataError: it cannot do that.
        """
        facts, label, causal = self.cache_facts, self.selection.label, common.causal
        if isinstance(causal, torch.Tensor):
            if not facts.causal_by_request:
                raise MetadataError(
                    f"{label} ({self._layers}): causal and non-causal requests in one batch, and its kernel takes one "
                    "bool for all: split the batch, or choose a backend that takes both"
                )
        elif not causal and not facts.non_causal:
            raise MetadataError(
                f"{label} ({self._layers}): the step is not causal, and its kernel over a paged cache is: choose a "
                "backend that is not"
            )
        elif causal and not self.causal:
            raise MetadataError(
                f"{label} ({self._layers}): the step says causal=True, and these layers were built with causal=False: "
                "state the same in both"
            )
        if facts.host_lengths and common.seq_lens_cpu is None:
            raise MetadataError(
                f"{label} ({self._layers}): it plans each step on the host, and the step says key lengths on the "
                "device only: state seq_lens_cpu"
            )

    @property
    def _layers(self) -> str:
        more = len(self.layer_names) - 1
        return self.layer_names[0] + (f" and {more} more" if more else "")


def init_attention_groups(
    layers: Iterable[PagedLayer],
    specs: Mapping[str, KVCacheSpec],
    device: torch.device,
    num_ubatches: int = 1,
    *,
    batch_invariant: bool = False,
) -> tuple[AttentionGroup, ...]:
    """Sorts a model's paged layers into groups and makes their builders; settles the page size of the kernels.

    Args:
        layers: in the order in which they run.
        specs: cache group -> what its pages hold; the layers' own statements have to agree.
        device: of the tensors.
        num_ubatches: micro-batches that a step is cut into; each has builders of its own.
        batch_invariant: no result may depend on the rest of a batch, whatever the layers asked for.

    Raises:
        ConfigError: no page size suits all backends of a cache group.
        ValueError: a name twice, a cache group without a spec or with another one, or a layer that cannot read the
            cache that it names.
        RuntimeError: batch invariance from a backend that does not have it.
    """
    layers = list(layers)
    if num_ubatches < 1:
        raise ValueError(f"num_ubatches={num_ubatches}: a step is at least one micro-batch")
    check_layers(layers, specs, batch_invariant=batch_invariant)
    sizes = {name: _kernel_block_size(name, spec, layers) for name, spec in specs.items()}
    members: dict[tuple[object, ...], list[PagedLayer]] = {}
    for layer in layers:
        layer.take_kernel_block_size(sizes[layer.cache_group])
        key = (layer.cache_group, sizes[layer.cache_group], layer.kv_cache_spec, layer.group_key)
        members.setdefault(key, []).append(layer)
    return tuple(
        _group(number, key, found, sizes, device, num_ubatches)
        for number, (key, found) in enumerate(members.items())
    )


def graph_support(level: AttentionCGSupport, impl: type[Any], own: type[Any]) -> AttentionCGSupport:
    """The level of the backend's own impl; of one that replaces it what that states in `cudagraph_support`.

    One that changes what runs and states nothing is captured in no graph: the level was declared for other code.
    """
    for cls in impl.__mro__[: impl.__mro__.index(own) if own in impl.__mro__ else 0]:
        stated = vars(cls).get("cudagraph_support")
        if stated is not None:
            return AttentionCGSupport(stated)
        if not _RUNS.isdisjoint(vars(cls)):
            return AttentionCGSupport.NEVER
    return level


def cudagraph_supports(groups: Iterable[AttentionGroup]) -> dict[str, AttentionCGSupport]:
    """Backend and variant -> which batches one captured CUDA graph serves; what resolve_cudagraph_mode looks at."""
    found: dict[str, AttentionCGSupport] = {}
    for group in groups:
        label = group.selection.label
        found[label] = min(found.get(label, AttentionCGSupport.ALWAYS), group.cudagraph_support)
    return found


def _group(
    number: int,
    key: tuple[object, ...],
    layers: list[PagedLayer],
    sizes: Mapping[str, int],
    device: torch.device,
    num_ubatches: int,
) -> AttentionGroup:
    first, names = layers[0], tuple(layer.prefix for layer in layers)
    selection = first.selection
    assert selection is not None  # check_layers
    spec = first.kv_cache_spec.with_block_size(sizes[first.cache_group])
    return AttentionGroup(
        group_id=f"{number}:{first.cache_group}:{selection.label}",
        cache_group=first.cache_group,
        layer_names=names,
        sharing={layer.prefix: layer.kv_sharing_target for layer in layers if layer.kv_sharing_target},
        selection=selection,
        kv_cache_spec=first.kv_cache_spec,
        kernel_spec=spec,
        causal=selection.request.causal,
        builders=tuple(first.make_builder(spec, names, device) for _ in range(num_ubatches)),
        impl_cls=None if (impl := getattr(first, "impl", None)) is None else type(impl),
        key=key,
        built=tuple(_Built() for _ in range(num_ubatches)),
    )


def _kernel_block_size(name: str, spec: KVCacheSpec, layers: Iterable[PagedLayer]) -> int:
    selections = [layer.selection for layer in layers if layer.cache_group == name]
    backends = {
        chosen.label: chosen.backend_cls.get_supported_kernel_block_sizes(chosen.variant, spec.kind)
        for chosen in selections
        if chosen is not None
    }
    return select_common_block_size(spec.block_size, backends)
