"""AITER_QUANT_ATTN: aiter's MHA v4, attention on quantised operands, for AMD gfx942 and gfx950.

Package and module: amd-aiter, aiter.ops.mha_v4. The kernels quantise bfloat16 [B, S, H, 128] tensors themselves;
the result is bfloat16. Dense and non-causal calls alone: no masks, no packing, no backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from omni_attn.backends.abstract import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    foreign_metadata,
)
from omni_attn.backends.aiter_quant_kernels import (
    MHA_V4_PACKAGE,
    QuantKernel,
    import_quant_kernel,
)
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import DENSE_FIELDS, read_record
from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest, BackendFacts, DeviceInfo, HeadSizes
from omni_attn.facts.backend import BFLOAT16

if TYPE_CHECKING:
    from omni_attn.config import AttentionSpec

DEFAULT_FORMAT = "fp8"
FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gfx942": ("fp8", "i8fp8"),
        "gfx950": ("bf16", "fp8", "i8fp8", "mxfp8", "mxfp6", "mxfp4", "f6f4", "f8f6"),
    }
)
"""The number formats that have kernels on an architecture."""


@dataclass(frozen=True, eq=False)
class AiterQuantMetadata:
    """M of AITER_QUANT_ATTN.

    Attributes:
        is_empty: there is no query or no key: the output is zeros.
    """

    is_empty: bool = False


class AiterQuantMetadataBuilder(AttentionMetadataBuilder):
    """Nothing to prepare: a record may hold what hides nothing, and is otherwise refused."""

    reads: frozenset[str] = DENSE_FIELDS

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> AiterQuantMetadata:
        """See AttentionMetadataBuilder.build.

        Raises:
            MetadataError: also for every mask, packing, causal attention and a window.
        """
        unable = [name for name in ("cu_seqlens_q", "packed_padding") if getattr(record, name) is not None]
        unable += [name for name in ("causal", "window") if getattr(self, name)]
        if not unable and read_record(record, lengths).mask is not None:
            unable = ["attn_mask"]
        if unable:
            raise MetadataError(
                f"AITER_QUANT_ATTN cannot honour {', '.join(unable)}: its kernels are dense and not causal. Choose "
                "TORCH_SDPA for this role, or add it as fallback"
            )
        return AiterQuantMetadata(is_empty=0 in lengths)


class AiterQuantImpl(AttentionImpl):
    """One layer on MHA v4."""

    backend: ClassVar[str] = "AITER_QUANT_ATTN"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.kernel: QuantKernel = import_quant_kernel(_format_of(self.spec))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AiterQuantMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward."""
        if not isinstance(metadata, AiterQuantMetadata):
            raise foreign_metadata(self, metadata, AiterQuantMetadata)
        if metadata.is_empty:
            return query.new_zeros(*query.shape[:3], value.shape[-1])
        if torch.compiler.is_compiling():
            return torch.ops.omni_attn.aiter_quant(query, key, value, self.kernel.format)  # type: ignore[no-any-return]
        return self.kernel(query, key, value)


def _format_of(spec: AttentionSpec | None) -> str:
    return DEFAULT_FORMAT if spec is None or spec.aiter_quant is None else spec.aiter_quant.format


class AiterQuantBackend(AttentionBackend):
    """Quantised attention of aiter."""

    facts: ClassVar[BackendFacts] = BackendFacts(
        summary="attention of aiter on quantised operands, for AMD gfx942 and gfx950",
        device_kinds=frozenset({"rocm"}),
        architectures=frozenset(FORMATS),
        packages=(MHA_V4_PACKAGE,),
        dtypes=frozenset({BFLOAT16}),
        head_sizes=HeadSizes(allowed=(128,)),
        gqa=True,
        gqa_ratios=frozenset({1, 2, 4, 8, 16}),
        custom_scale=False,
        compile_mode="custom_op",
        option_fields=frozenset({"aiter_quant"}),
        numerics="quantised",
        error="1.5e-1",  # format fp8: the ceiling of SGLang's test of the same call, not a measurement
        sequence_parallel=frozenset({"ulysses", "allgather_kv"}),
    )

    @staticmethod
    def get_name() -> str:
        """AITER_QUANT_ATTN."""
        return "AITER_QUANT_ATTN"

    @staticmethod
    def get_impl_cls() -> type[AiterQuantImpl]:
        """AiterQuantImpl."""
        return AiterQuantImpl

    @staticmethod
    def get_builder_cls() -> type[AiterQuantMetadataBuilder]:
        """AiterQuantMetadataBuilder."""
        return AiterQuantMetadataBuilder

    @classmethod
    def validate_configuration(
        cls, request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None
    ) -> list[str]:
        """See AttentionBackend.validate_configuration; also which formats this architecture has."""
        reasons = super().validate_configuration(request, device, spec)
        able = FORMATS.get(device.name) if device.kind == "rocm" else None
        if able is not None and _format_of(spec) not in able:
            reasons.append(
                f"needs aiter_quant.format to be one of {', '.join(able)} on {device.name}, found {_format_of(spec)}"
            )
        return reasons
