"""FLEX_ATTN: torch's flex_attention, compiled: any mask, on any GPU that Triton knows.

Bool masks, padding, causal, windows and packed sequences are rules on token pairs with a map of the tiles they touch,
so that what is hidden is skipped; float masks are added to the scores. The rules read tensors: another mask of the same
shape is another input, never another compilation.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch.compiler import is_compiling as _is_compiling

from omni_attn.backends import flex_kernels
from omni_attn.backends.abstract import (
    AttentionBackend,
    AttentionImpl,
    foreign_metadata,
)
from omni_attn.backends.flex_plans import FlexMetadata, FlexMetadataBuilder
from omni_attn.backends.triton_package import TRITON_PACKAGES
from omni_attn.facts import BackendFacts, CapabilityRange, HeadSizes
from omni_attn.facts.backend import BFLOAT16, FLOAT16, FLOAT32
from omni_attn.ops.layout import fits_int32
from omni_attn.ops.segments import attend_segments, attend_segments_with_lse


class FlexAttentionImpl(AttentionImpl):
    """One layer on flex_attention."""

    backend: ClassVar[str] = "FLEX_ATTN"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        flex_kernels.require_triton()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: FlexMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward."""
        if not isinstance(metadata, FlexMetadata):
            raise foreign_metadata(self, metadata, FlexMetadata)
        if metadata.segments is None:
            return self._attend(metadata, query, key, value)  # type: ignore[no-any-return]
        return attend_segments(
            functools.partial(self._attend, metadata), query, key, value, metadata.segments
        )

    def forward_with_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: FlexMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionImpl.forward_with_lse."""
        if not isinstance(metadata, FlexMetadata):
            raise foreign_metadata(self, metadata, FlexMetadata)
        if metadata.segments is None:
            output, lse = self._attend(metadata, query, key, value, with_lse=True)
            shift = None if metadata.plan is None else metadata.plan.row_shift
            return output, lse if shift is None else lse + shift[..., 0]
        attend = functools.partial(self._attend, metadata, with_lse=True)
        return attend_segments_with_lse(attend, query, key, value, metadata.segments)

    def _attend(
        self,
        metadata: FlexMetadata,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        with_lse: bool = False,
    ) -> Any:
        plan = metadata.plan_on(query.device)
        tensors = (plan.block_mask, plan.bias, plan.unused_keys)
        if _is_compiling():
            return flex_kernels.attend(query, key, value, *tensors, self.softmax_scale, with_lse)
        # What torch compiles may count a view's offsets in 32 bits.
        query, key, value = (x if fits_int32(x) else x.contiguous() for x in (query, key, value))
        # All that makes torch compile again: one function has only so many compilations.
        layouts = (query.stride(), key.stride(), value.stride(), query.device)
        grads = (torch.is_grad_enabled(), query.requires_grad, key.requires_grad, value.requires_grad)
        shapes = (
            query.shape,
            key.shape,
            value.shape,
            query.dtype,
            layouts,
            grads,
            torch.is_inference_mode_enabled(),
        )
        compiled = flex_kernels.compiled_attend((shapes, plan.kind, self.softmax_scale, with_lse))
        return compiled(query, key, value, *tensors, self.softmax_scale, with_lse)


class FlexAttentionBackend(AttentionBackend):
    """torch's flex_attention; serves every mask on GPUs."""

    facts: ClassVar[BackendFacts] = BackendFacts(
        summary="torch flex_attention, compiled with Triton",
        device_kinds=frozenset({"cuda", "rocm", "xpu"}),
        capabilities=(CapabilityRange(minimum=(8, 0)),),
        packages=TRITON_PACKAGES,
        dtypes=frozenset({FLOAT16, BFLOAT16, FLOAT32}),
        head_sizes=HeadSizes(minimum=16, maximum=256),
        value_head_size=True,
        mask_kinds=frozenset({"padding", "arbitrary"}),
        causal=True,
        causal_with_mask=True,
        gqa=True,
        packing=True,
        window=True,
        lse=True,
        backward=True,
        compiled_backward=True,
        lse_backward=True,
        compile_mode="traceable",
        cudagraph=True,
        error="2.3e-3",
        sequence_parallel=frozenset({"ulysses", "ring", "ulysses_ring", "allgather_kv"}),
        tested_on=("sm_90 (H200)",),
    )

    @staticmethod
    def get_name() -> str:
        """FLEX_ATTN."""
        return "FLEX_ATTN"

    @staticmethod
    def get_impl_cls() -> type[FlexAttentionImpl]:
        """FlexAttentionImpl."""
        return FlexAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlexMetadataBuilder]:
        """FlexMetadataBuilder."""
        return FlexMetadataBuilder
