"""TRTLLM_ATTN: TensorRT-LLM's context kernels through FlashInfer, with SAGE quantisation and skip-softmax.

Sequences are told apart by boundaries alone: no kernel here takes a mask. Padding that the host states as lengths is
served by cutting it off; any other mask is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from omni_attn.backends.abstract import (
    AttentionBackend,
    AttentionImpl,
    foreign_metadata,
    metadata_of_another,
)
from omni_attn.backends.stated import Packed
from omni_attn.backends.trtllm_builder import TrtllmMetadata, TrtllmMetadataBuilder, quantisation
from omni_attn.backends.trtllm_calls import attend, attend_packed, load_kernel, trtllm_op, trtllm_packed_op
from omni_attn.backends.trtllm_facts import TRTLLM_FACTS, TRTLLM_VARIANTS, trtllm_variant
from omni_attn.backends.trtllm_parts import Part
from omni_attn.facts import BackendFacts, DeviceInfo
from omni_attn.ops.operators import needs_operator

if TYPE_CHECKING:
    from omni_attn.config import AttentionSpec
    from omni_attn.facts import AttentionRequest

# Where the quantised kernels exist: all 10.x kernels of each type that FlashInfer's own tests name.
_QUANT_CAPABILITIES = {"int8": ((10, 0),), "fp8_e4m3": ((10, 0), (10, 3))}


class TrtllmAttentionImpl(AttentionImpl):
    """One layer on a TRT-LLM kernel."""

    backend: ClassVar[str] = "TRTLLM_ATTN"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self._variant = trtllm_variant(self.variant).name
        self.kernel = load_kernel(self._variant, quantisation(self.spec) is not None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A kernel is looked up again where a copy is loaded."""
        kernel = load_kernel(state["_variant"], quantisation(state["spec"]) is not None)
        self.__dict__.update(state, kernel=kernel)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: TrtllmMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward."""
        if not isinstance(metadata, TrtllmMetadata):
            raise foreign_metadata(self, metadata, TrtllmMetadata)
        if metadata.made_for != self._variant:
            raise metadata_of_another(f"TRTLLM_ATTN ({self._variant})", metadata)
        if metadata.whole is not None:
            return self._run(query, key, value, metadata.whole)
        if metadata.packed is not None:
            return self._run_packed(query, key, value, metadata, metadata.packed)
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for part in metadata.parts:
            items = slice(None) if part.item is None else slice(part.item, part.item + 1)
            rows = slice(*part.rows)
            output[items, rows] = self._run(query[items, rows], key[items], value[items], part)
        return output

    def _run(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Part) -> torch.Tensor:
        start, end = part.keys
        if (start, end) != (0, key.shape[1]):
            key, value = key[:, start:end], value[:, start:end]
        call = (part.q_lens, part.k_lens, self.softmax_scale, self.causal, part.factor)
        if needs_operator(query, key, value):
            dtype, *blocks = part.quant or (None, 0, 0)
            made: torch.Tensor = trtllm_op(query, key, value, *call, dtype, *blocks, self._variant)
            return made
        return attend(self.kernel, query, key, value, *call, part.quant)

    def _run_packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: TrtllmMetadata,
        packed: Packed,
    ) -> torch.Tensor:
        assert metadata.unused_keys is not None and metadata.unused_rows is not None
        # Kernels multiply whole tiles: weight 0 times a NaN behind the last boundary would be NaN.
        key, value = (x.masked_fill(metadata.unused_keys, 0.0) for x in (key, value))
        boundaries = packed.cu_seqlens_q, packed.cu_seqlens_k, packed.max_seqlen_q, packed.max_seqlen_k
        call = (*boundaries, self.softmax_scale, self.causal, metadata.factor)
        output: torch.Tensor
        if needs_operator(query, key, value):
            output = trtllm_packed_op(query, key, value, *call, self._variant)
        else:
            output = attend_packed(self.kernel, query, key, value, *call)
        return output.masked_fill(metadata.unused_rows, 0.0)


class TrtllmAttentionBackend(AttentionBackend):
    """TensorRT-LLM's context kernels through FlashInfer."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        TRTLLM_FACTS,
        summary="TensorRT-LLM kernels through FlashInfer: Blackwell 10.x, and 9.0 by name",
        variants=TRTLLM_VARIANTS,
        option_fields=frozenset({"quant", "skip_softmax"}),
        error="2.3e-3",
    )

    @staticmethod
    def get_name() -> str:
        """TRTLLM_ATTN."""
        return "TRTLLM_ATTN"

    @staticmethod
    def get_impl_cls() -> type[TrtllmAttentionImpl]:
        """TrtllmAttentionImpl."""
        return TrtllmAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TrtllmMetadataBuilder]:
        """TrtllmMetadataBuilder."""
        return TrtllmMetadataBuilder

    @classmethod
    def validate_configuration(
        cls, request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None
    ) -> list[str]:
        """See AttentionBackend.validate_configuration; also the values of `quant` that the kernels have."""
        reasons = super().validate_configuration(request, device, spec)
        if spec is None or spec.quant is None:
            return reasons
        return [*reasons, *_quant_reasons(request, device, spec, cls.select_variant(request, device, spec))]


def _quant_reasons(
    request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec, selected: str | None
) -> list[str]:
    quant = spec.quant
    assert quant is not None
    reasons = []
    variant = selected or spec.variant
    if variant not in (None, "ragged"):
        reasons.append(f"needs variant ragged for quant, found {variant}")
    if quant.dtype_vo not in (None, "fp8_e4m3"):
        reasons.append(f"needs quant.dtype_vo fp8_e4m3 or none, found {quant.dtype_vo}")
    capabilities = _QUANT_CAPABILITIES.get(quant.dtype_qk or "")
    if capabilities is None:
        reasons.append(f"needs quant.dtype_qk int8 or fp8_e4m3, found {quant.dtype_qk or 'none'}")
    elif selected == "ragged" and device.capability not in capabilities:
        able = " or ".join(f"sm_{major}{minor}" for major, minor in capabilities)
        reasons.append(f"needs {able} for quant.dtype_qk {quant.dtype_qk}, found {device.name}")
    if request.causal:
        reasons.append("needs attention that is not causal for quant, found causal")
    return reasons
