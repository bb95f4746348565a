"""The contract of a backend: three classes with three lifetimes.

AttentionBackend          static facts; never instantiated
AttentionMetadataBuilder  once per step per group of layers: record + lengths -> M
AttentionImpl             one per layer: query, key, value, M -> output
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ValidationError

from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest, BackendFacts, DeviceInfo, choose_variant

if TYPE_CHECKING:
    import torch

    from omni_attn.backends.metadata import AttentionMetadata
    from omni_attn.calibration import LayerCalibration
    from omni_attn.config import AttentionSpec
    from omni_attn.ops.block_sparse.selection import BlockSelection


class _LayerGeometry:
    """What every builder and impl is constructed with; the same keywords for both.

    Args:
        num_heads, num_kv_heads: query heads, key-value heads.
        head_size: channels of a query and key head; value_head_size of a value head (None = head_size).
        softmax_scale: factor on the scores.
        causal: bottom-right aligned causal attention.
        spec: the person's options, None for a platform default.
        variant: the variant that was selected, None for a backend without variants.
        window: (left, right) tokens in sight, None = all.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        spec: AttentionSpec | None = None,
        variant: str | None = None,
        window: tuple[int, int] | None = None,
        value_head_size: int | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.spec = spec
        self.variant = variant
        self.window = window
        self.value_head_size = head_size if value_head_size is None else value_head_size


class AttentionMetadataBuilder(_LayerGeometry, ABC):
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


class AttentionImpl(_LayerGeometry, ABC):
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


def foreign_metadata(impl: AttentionImpl, metadata: object, expected: type) -> MetadataError:
    """The error for an M that this impl's builder did not make; records are prepared by the Attention layer."""
    return MetadataError(
        f"{impl.backend or type(impl).__name__} needs the {expected.__name__} that its builder makes, found "
        f"{type(metadata).__name__}: hand records to the Attention layer, which prepares them for its backend"
    )


def metadata_of_another(label: str, metadata: Any) -> MetadataError:
    """The error for an M that the same builder class made for another kernel, whose limits it was held against."""
    return MetadataError(
        f"{label} needs the {type(metadata).__name__} that its own builder makes, found one made_for "
        f"{metadata.made_for}, whose kernel has other limits: hand records to the Attention layer"
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
            needed += ["get_paged_impl_cls", "get_paged_builder_cls", "get_kv_cache_shape"]
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
    def get_paged_impl_cls() -> type[Any]:
        """The class of one layer's kernel over a paged KV cache."""
        raise TypeError("this backend has no paged impl: its facts say paged=False")

    @staticmethod
    def get_paged_builder_cls() -> type[Any]:
        """The class that prepares a step over a paged KV cache."""
        raise TypeError("this backend has no paged builder: its facts say paged=False")

    @staticmethod
    def get_kv_cache_shape(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        """Shape of the paged KV cache."""
        raise TypeError("this backend has no KV cache: its facts say paged=False")

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        """Page sizes that the kernel takes."""
        raise TypeError("this backend has no KV cache: its facts say paged=False")

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
