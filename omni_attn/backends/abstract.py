"""The contract of a backend: three classes with three lifetimes.

AttentionBackend          static facts; never instantiated
AttentionMetadataBuilder  once per step per group of layers: record + lengths -> M
AttentionImpl             one per layer: query, key, value, M -> output
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ValidationError

from omni_attn.backends.geometry import LayerGeometry
from omni_attn.backends.refusals import foreign_metadata, metadata_of_another
from omni_attn.facts import AttentionRequest, BackendFacts, DeviceInfo, KernelFacts, choose_variant
from omni_attn.facts.kv_cache import BlockSizes, CacheFacts, KVCacheSpec, kv_cache_shape

if TYPE_CHECKING:
    import torch

    from omni_attn.backends.metadata import AttentionMetadata
    from omni_attn.backends.mla import MLAImpl
    from omni_attn.backends.mla_builder import MLAMetadataBuilder
    from omni_attn.backends.paged import PagedAttentionImpl, PagedMetadataBuilder
    from omni_attn.calibration import LayerCalibration
    from omni_attn.config import AttentionSpec
    from omni_attn.ops.block_sparse.selection import BlockSelection

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadataBuilder",
    "LayerGeometry",
    "foreign_metadata",
    "metadata_of_another",
]


class AttentionMetadataBuilder(LayerGeometry, ABC):
    """Turns a record into the backend's own metadata M, a frozen dataclass, once per step per group.

    The only place that makes masks, cu_seqlens, permutations, counts, plans and step gates; it runs outside compiled
    and captured code and does not wait for the device.
    """

    #: Fields of AttentionMetadata that `build` looks at. A record that states a binding field not named here is
    #: refused before `build` is called. A builder whose spec decides that sets it on itself.
    reads: frozenset[str] = frozenset()
    #: What a checkpoint says about the layers it builds for, see `Attention.calibrate`; None = nothing was said.
    calibration: LayerCalibration | None = None
    #: Number of the layer in its model, the first whole number in its name ("blocks.12.attn1"); None = it has none.
    layer_index: int | None = None

    @property
    def group_key(self) -> object:
        """What tells layers of equal backend, spec and geometry apart: only layers of equal keys share a product.

        A builder that looks at `layer_index` says here what it makes of it, as few kinds as there are.
        """
        return self.calibration

    @abstractmethod
    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> Any:
        """M for calls with `lengths` = (query tokens, key tokens).

        Raises:
            MetadataError: the record states something that the backend cannot express.
        """


class AttentionImpl(LayerGeometry, ABC):
    """One layer's kernel. Imports its optional package in the constructor and reads no config, platform or context.

    Raises:
        BackendImportError: (constructor) the package is missing, broken, or lacks a needed symbol.
    """

    #: Public name of the backend it belongs to, for error texts.
    backend: ClassVar[str] = ""
    #: A builder that replaces the backend's own, where an impl changes the layout too.
    builder_cls: ClassVar[type[AttentionMetadataBuilder] | None] = None

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: Any,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of query [B, Sq, H, D] over key [B, Sk, G, D] and value [B, Sk, G, Dv]: [B, Sq, H, Dv].

        The output has query's dtype and is contiguous; inputs may be strided and are not modified.
        """

    def forward_with_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and the log-sum-exp of the scaled scores [B, H, Sq] float32 (natural log, -inf without a key)."""
        raise TypeError(
            f"{type(self).__name__} gives no LSE: its facts say lse=False; choose a backend that has it"
        )

    def select_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: Any,
        **layer_inputs: torch.Tensor,
    ) -> BlockSelection | None:
        """The blocks that `forward` attends to with the same arguments; None where this step is computed densely.

        For looking at a selection, not for the hot path; with `facts.selects_blocks`.
        """
        raise TypeError(
            f"{type(self).__name__} selects no blocks: its facts say selects_blocks=False; choose a backend that does"
        )


class AttentionBackend:
    """Static facts and the two classes that do the work. A class to ask, never an object."""

    facts: ClassVar[BackendFacts]
    #: Model of the free `options` mapping; only for backends that are added from outside.
    options_model: ClassVar[type[BaseModel] | None] = None

    def __new__(cls, *_: object, **__: object) -> AttentionBackend:
        raise TypeError(f"{cls.__name__} holds static facts only and is never instantiated")

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        lacking = [] if isinstance(getattr(cls, "facts", None), BackendFacts) else ["facts: BackendFacts"]
        needed = ["get_name"]
        if not lacking and cls.facts.stateless:
            needed += ["get_impl_cls", "get_builder_cls"]
        if not lacking and cls.facts.paged:
            needed += ["get_paged_impl_cls", "get_paged_builder_cls"]
        if not lacking and cls.facts.mla:
            needed += ["get_mla_impl_cls", "get_mla_builder_cls"]
        lacking += [f"{name}()" for name in needed if getattr(cls, name) is getattr(AttentionBackend, name)]
        if lacking:
            raise TypeError(f"backend class {cls.__name__} is incomplete: it lacks {', '.join(lacking)}")

    @staticmethod
    def get_name() -> str:
        """The public name: registry key and YAML word."""
        raise TypeError("a backend class gives its public name in get_name()")

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """The class of one layer's kernel."""
        raise TypeError("this backend has no stateless impl: its facts say stateless=False")

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """The class that prepares a step."""
        raise TypeError("this backend has no stateless builder: its facts say stateless=False")

    @staticmethod
    def get_paged_impl_cls() -> type[PagedAttentionImpl]:
        """The class of one layer's kernels over a paged KV cache."""
        raise TypeError("this backend has no paged impl: its facts say paged=None")

    @staticmethod
    def get_paged_builder_cls() -> type[PagedMetadataBuilder]:
        """The class that prepares a step over a paged KV cache."""
        raise TypeError("this backend has no paged builder: its facts say paged=None")

    @staticmethod
    def get_mla_impl_cls() -> type[MLAImpl]:
        """The class of one layer's kernels over a paged cache of latents."""
        raise TypeError("this backend has no MLA impl: its facts say mla=None")

    @staticmethod
    def get_mla_builder_cls() -> type[MLAMetadataBuilder]:
        """The class that prepares a step over a paged cache of latents."""
        raise TypeError("this backend has no MLA builder: its facts say mla=None")

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        """Logical shape of one layer's pages: [N, 2, P, G, D], keys before values; of MLA [N, P, D].

        Raises:
            ValueError: key and value differ in size, which one tensor of this shape cannot hold.
        """
        cls._side(spec.kind)
        return kv_cache_shape(num_blocks, spec)

    @classmethod
    def get_supported_kernel_block_sizes(cls, variant: str | None = None, kind: str = "full") -> BlockSizes:
        """Page sizes that a variant's kernel takes."""
        return cls.get_cache_facts(variant, kind).block_sizes

    @classmethod
    def get_cache_facts(cls, variant: str | None = None, kind: str = "full") -> CacheFacts:
        """What a variant's kernel takes of a paged cache; kind: of the cache's spec."""
        side = cls._side(kind)
        kernels: tuple[KernelFacts, ...] = (side,)
        if side.variants:
            kernels = tuple(v.facts for v in side.variants if variant in (None, v.name))
        if not kernels or kernels[0].cache is None:
            raise TypeError(f"{cls.get_name()} has no kernel over a paged KV cache by the name {variant!r}")
        return kernels[0].cache

    @classmethod
    def _side(cls, kind: str) -> BackendFacts:
        name = "mla" if kind == "mla" else "paged"
        side: BackendFacts | None = getattr(cls.facts, name)
        if side is None:
            raise TypeError(f"this backend has no KV cache of kind {kind}: its facts say {name}=None")
        return side

    @classmethod
    def validate_configuration(
        cls, request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None
    ) -> list[str]:
        """Reasons, each "needs X, found Y", why this backend cannot serve the request here; empty = it can."""
        return [*cls._choose(request, device, spec)[1], *cls._option_reasons(spec)]

    @classmethod
    def select_variant(
        cls, request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None
    ) -> str | None:
        """The variant that serves a request which `validate_configuration` accepts."""
        return cls._choose(request, device, spec)[0]

    @classmethod
    def _choose(
        cls, request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None
    ) -> tuple[str | None, tuple[str, ...]]:
        pinned = spec.variant if spec else None
        return choose_variant(cls.facts, request, device, pinned, by_default=spec is None)

    @classmethod
    def _option_reasons(cls, spec: AttentionSpec | None) -> list[str]:
        if spec is None or not spec.options:
            return []
        if cls.options_model is None:
            return [
                f"needs no options, found {', '.join(spec.options)}: {cls.get_name()} declares no options_model"
            ]
        try:
            cls.options_model.model_validate(dict(spec.options))
        except ValidationError as error:
            return [f"options.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        return []
