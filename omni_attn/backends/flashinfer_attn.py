"""FLASHINFER_ATTN: FlashInfer's prefill kernels over ragged tensors, planned once and run per layer.

Dense and packed calls, and padding that the host states (kv_lengths), run through a plan on every variant; masks that
only the device knows run on variant fa2. quant.dtype_vo = fp8_e4m3 runs on variant cute-dsl.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from omni_attn.backends.abstract import (
    AttentionBackend,
    AttentionImpl,
    foreign_metadata,
)
from omni_attn.backends.flashinfer_builder import FlashInferMetadata, FlashInferMetadataBuilder, window_left
from omni_attn.backends.flashinfer_kernels import (
    FLASHINFER_FACTS,
    FLASHINFER_VARIANTS,
    FlashInferKernel,
    import_flashinfer,
)
from omni_attn.backends.flashinfer_masks import attend_masked
from omni_attn.backends.flashinfer_ops import masked_op, ragged_op, ragged_with_lse_op
from omni_attn.backends.flashinfer_paged import FlashInferPagedBuilder, FlashInferPagedImpl
from omni_attn.backends.flashinfer_paged_kernels import FLASHINFER_PAGED_FACTS
from omni_attn.backends.flashinfer_plans import Plan, find_plan, is_capturing, keep_captured
from omni_attn.backends.flashinfer_quant import quant_reasons, wants_fp8, with_fp8_variant
from omni_attn.backends.flashinfer_shapes import RaggedShape, check_views
from omni_attn.config import AttentionSpec
from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest, BackendFacts, DeviceInfo
from omni_attn.ops.operators import needs_operator
from omni_attn.ops.segments import empty_attention


class FlashInferImpl(AttentionImpl):
    """One layer on a FlashInfer kernel."""

    backend: ClassVar[str] = "FLASHINFER_ATTN"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.kernel: FlashInferKernel = import_flashinfer(self.variant)
        asked = self.spec.quant.dtype_qk if self.spec is not None and self.spec.quant is not None else None
        self._cast: torch.dtype | None = None if asked is None else getattr(torch, asked)
        self._fp8 = wants_fp8(self.spec)
        left = window_left(self.window, self.causal)
        self._window_left = -1 if left is None else left  # the builder refuses the other windows

    def __getstate__(self) -> dict[str, Any]:
        """A kernel is looked up again where a copy is loaded."""
        return {name: value for name, value in self.__dict__.items() if name != "kernel"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, kernel=import_flashinfer(state["variant"]))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: FlashInferMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward.

        Raises:
            MetadataError: the first call of a shape lies inside a CUDA-graph capture.
        """
        if not isinstance(metadata, FlashInferMetadata):
            raise foreign_metadata(self, metadata, FlashInferMetadata)
        if self._cast is None or self._cast is query.dtype:
            return self._attend(query, key, value, metadata)
        cast = self._cast
        return self._attend(query.to(cast), key.to(cast), value.to(cast), metadata).to(query.dtype)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: FlashInferMetadata
    ) -> torch.Tensor:
        if metadata.segments == () or not query.shape[0]:
            return empty_attention(query, value)[0]
        if metadata.packed_mask is not None:
            return self._masked(query, key, value, metadata)
        if needs_operator(query, key, value):
            output: torch.Tensor = ragged_op(query, key, value, *self._arguments(metadata))
            return output
        return self._plan(query, key, value, metadata).attend(query, key, value)

    def _masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: FlashInferMetadata
    ) -> torch.Tensor:
        if self.kernel.single is None:
            raise MetadataError(
                f"FLASHINFER_ATTN ({self.kernel.variant}) got FlashInferMetadata with a packed_mask, which variant fa2 "
                "makes for itself: hand records to the Attention layer, which prepares them for its backend"
            )
        assert metadata.packed_mask is not None and metadata.empty_rows is not None
        if metadata.unused_keys is not None:
            # Kernels multiply whole tiles of values: weight 0 times a NaN behind the last boundary would be NaN.
            value = value.masked_fill(metadata.unused_keys, 0.0)
        masks = (metadata.packed_mask, metadata.empty_rows, self.softmax_scale)
        if needs_operator(query, key, value):
            output: torch.Tensor = masked_op(query, key, value, *masks)
            return output
        return attend_masked(self.kernel.single, query, key, value, *masks)

    def forward_with_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: FlashInferMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionImpl.forward_with_lse."""
        if not isinstance(metadata, FlashInferMetadata):
            raise foreign_metadata(self, metadata, FlashInferMetadata)
        if metadata.segments == ():
            return empty_attention(query, value)
        if metadata.without_lse is not None:
            raise MetadataError(
                f"log-sum-exp asked for, and {metadata.without_lse}: pass sequences one by one"
            )
        dtype = query.dtype
        if self._cast is not None:
            query, key, value = query.to(self._cast), key.to(self._cast), value.to(self._cast)
        if needs_operator(query, key, value):
            output, lse = ragged_with_lse_op(query, key, value, *self._arguments(metadata))
        else:
            output, lse = self._plan(query, key, value, metadata).attend_with_lse(query, key, value)
        return output.to(dtype), lse

    def _plan(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: FlashInferMetadata
    ) -> Plan:
        call = (query.shape[0], query.dtype, query.device)
        plan = metadata.plans.get(call)
        if plan is None:
            shape = RaggedShape(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                softmax_scale=self.softmax_scale,
                causal=self.causal,
                window_left=self._window_left,
                batch=query.shape[0],
                lengths=(query.shape[1], key.shape[1]),
                segments=metadata.segments,
                kv_lengths=metadata.kv_lengths,
                fp8_values=self._fp8,
            )
            plan = metadata.plans[call] = find_plan(self.kernel, shape, query, key, value)
        elif not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
            check_views(self.kernel, query, key, value)  # the plan was found for other strides
        if is_capturing(query):
            keep_captured(plan)
        return plan

    def _arguments(self, metadata: FlashInferMetadata) -> tuple[Any, ...]:
        """What the operators want beside the tensors."""
        segments = metadata.segments
        flat = None if segments is None else [number for segment in segments for number in segment]
        kv_lengths = None if metadata.kv_lengths is None else list(metadata.kv_lengths)
        geometry = (self.softmax_scale, self.causal, self._window_left, self._fp8, self.kernel.variant)
        return (flat, kv_lengths, *geometry)


class FlashInferBackend(AttentionBackend):
    """FlashInfer's prefill kernels."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        FLASHINFER_FACTS,
        summary="FlashInfer prefill kernels, planned once and run per layer",
        variants=FLASHINFER_VARIANTS,
        option_fields=frozenset({"quant"}),
        error="2.3e-3",
        paged=FLASHINFER_PAGED_FACTS,
    )

    @staticmethod
    def get_name() -> str:
        """FLASHINFER_ATTN."""
        return "FLASHINFER_ATTN"

    @staticmethod
    def get_impl_cls() -> type[FlashInferImpl]:
        """FlashInferImpl."""
        return FlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        """FlashInferMetadataBuilder."""
        return FlashInferMetadataBuilder

    @staticmethod
    def get_paged_impl_cls() -> type[FlashInferPagedImpl]:
        """FlashInferPagedImpl."""
        return FlashInferPagedImpl

    @staticmethod
    def get_paged_builder_cls() -> type[FlashInferPagedBuilder]:
        """FlashInferPagedBuilder."""
        return FlashInferPagedBuilder

    @classmethod
    def validate_configuration(
        cls, request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None
    ) -> list[str]:
        """See AttentionBackend.validate_configuration; also judges the quant block."""
        if request.kv_cache is not None:
            reasons = super().validate_configuration(request, device, spec)
            if spec is not None and spec.quant is not None:
                reasons.append(
                    "needs no quant block over a paged KV cache, found one: its kernels read the cache as it is"
                )
            return reasons
        reasons = super().validate_configuration(request, device, with_fp8_variant(spec))
        return [*reasons, *quant_reasons(request, device, spec)]

    @classmethod
    def select_variant(
        cls, request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None
    ) -> str | None:
        """See AttentionBackend.select_variant; quantised values have a variant of their own."""
        if request.kv_cache is not None:
            return super().select_variant(request, device, spec)
        return super().select_variant(request, device, with_fp8_variant(spec))
