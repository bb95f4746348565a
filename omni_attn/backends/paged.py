"""The contract of attention over a paged KV cache: the same three lifetimes as stateless attention.

CommonAttentionMetadata    one per KV-cache group and step, made by whoever runs the model
PagedMetadataBuilder       one per attention group: common metadata -> M, once per step or chunk
PagedAttentionImpl         one per layer: writes new keys and values, reads the pages

Legend: R requests, T query tokens of all requests, W pages a request may have, H heads, G kv heads, D head size,
P tokens of a page, N pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from omni_attn.backends.buffers import BufferPool
from omni_attn.backends.cache_scales import CacheScales
from omni_attn.backends.geometry import LayerGeometry
from omni_attn.backends.paged_common import NULL_BLOCK, PAD_SLOT, CommonAttentionMetadata
from omni_attn.backends.refusals import refuse_output_scales
from omni_attn.errors import MetadataError
from omni_attn.facts.kv_cache import AttentionCGSupport, KVCacheSpec

__all__ = [
    "NULL_BLOCK",
    "PAD_SLOT",
    "CommonAttentionMetadata",
    "PagedAttentionImpl",
    "PagedMetadataBuilder",
]


class PagedMetadataBuilder(LayerGeometry, ABC):
    """Turns common metadata into the backend's own M, a frozen dataclass, for all layers of an attention group.

    Args:
        kv_cache_spec: with the page size that the kernel gets.
        layer_names: layers of the group.
        device: of the tensors.
        geometry: see AttentionImpl.
    """

    #: Most query tokens of a request that count as decode; None = the order of requests does not matter.
    reorder_batch_threshold: int | None = None
    supports_update_block_table: ClassVar[bool] = False

    def __init__(
        self, *, kv_cache_spec: KVCacheSpec, layer_names: Sequence[str], device: torch.device, **geometry: Any
    ) -> None:
        super().__init__(**geometry)
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = tuple(layer_names)
        self.device = device
        self.buffers = BufferPool(device)
        self._for_cudagraph = False

    @abstractmethod
    def build(self, common: CommonAttentionMetadata) -> Any:
        """M of one step; does not wait for the device, and changes nothing that it is given.

        Raises:
            MetadataError: the step is one that the kernel cannot express.
        """

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
        """M of a step that a CUDA graph captures, and of each one that it replays.

        Its tensors lie where the captured ones lay, and all of its numbers are the same: `common` comes in tensors that
        keep their addresses and with the upper bounds of the graph, and what `build` computes goes through `stage`.
        """
        self._for_cudagraph = True
        try:
            return self.build(common)
        finally:
            self._for_cudagraph = False

    def stage(
        self, name: str, values: torch.Tensor, *, rows: int | None = None, fill: float = 0
    ) -> torch.Tensor:
        """On the device, what `build` computed: where a CUDA graph reads it, if the step is for one.

        Args:
            name: tells the tensors of an M apart.
            rows: for a graph, of the result, see BufferPool.stage; what is more or fewer from step to step needs it.
            fill: for a graph, what stands behind the values then.
        """
        if self._for_cudagraph:
            return self.buffers.stage(name, values, rows=rows, fill=fill)
        return values.to(self.device, non_blocking=True)

    def update_block_table(
        self, metadata: Any, block_table: torch.Tensor, slot_mapping: torch.Tensor | None
    ) -> Any:
        """A new M that differs from `metadata` in pages and slots alone; shares everything else with it."""
        return replace(metadata, block_table=block_table, slot_mapping=slot_mapping)


class PagedAttentionImpl(CacheScales, LayerGeometry, ABC):
    """One layer's kernels over a paged cache. Imports its optional package in the constructor.

    Args:
        kv_cache_spec: of the layer, with the page size that the kernel gets.
        geometry: see AttentionImpl.

    Raises:
        BackendImportError: (constructor) the package is missing, broken, or lacks a needed symbol.
    """

    backend: ClassVar[str] = ""
    #: For a class that replaces a backend's own and changes what runs: which batches a CUDA graph of it serves.
    cudagraph_support: ClassVar[AttentionCGSupport | None] = None
    #: What is stored is key / key_scale and value / value_scale, for caches of fewer bits; a loader sets other ones.
    key_scale: float = 1.0
    value_scale: float = 1.0
    scale_names: ClassVar[tuple[str, ...]] = ("key_scale", "value_scale")

    def __init__(self, *, kv_cache_spec: KVCacheSpec, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.kv_cache_spec = kv_cache_spec

    def refuse_output_scales(self, *scales: torch.Tensor | None) -> None:
        """Raises NotImplementedError if one is given: for impls that write their output in query's dtype alone."""
        refuse_output_scales(self, *scales)

    @abstractmethod
    def update_kv_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes key [T, G, D] and value [T, G, Dv] into their slots; a slot of -1 is skipped.

        Args:
            kv_cache: the layer's pages, logical shape `get_kv_cache_shape`; only named slots change.
            slot_mapping: int64 [T], or shorter: rows behind it are not written.
        """

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [T, H, D] over the pages, written into output [T, H, Dv], which is given back.

        Args:
            key, value: this step's own, already in the cache; for kernels that read them from here.
            metadata: M; None = a run that measures memory: the output is filled with zeros.

        Raises:
            NotImplementedError: an output scale is given, and the impl has no quantised output.
        """


def one_causality(label: str, causal: bool | torch.Tensor) -> bool:
    """The causality of all requests of a step, for kernels that have one.

    Raises:
        MetadataError: it is told for each request.
    """
    if isinstance(causal, torch.Tensor):
        raise MetadataError(
            f"{label} cannot take causal and non-causal requests in one batch, which only the device could tell apart: "
            "state one bool for all of them, split the batch, or choose TRITON_ATTN or TORCH_SDPA for this role"
        )
    return causal
