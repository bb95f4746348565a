"""TORCH_SDPA: torch.nn.functional.scaled_dot_product_attention with torch's own choice of kernel, on any device."""

from __future__ import annotations

from typing import ClassVar

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.masked import MaskedMetadataBuilder
from omni_attn.backends.mla_builder import MLAMetadataBuilder
from omni_attn.backends.torch_sdpa_impl import TorchSDPAImpl
from omni_attn.backends.torch_sdpa_mla import TorchMLAImpl
from omni_attn.backends.torch_sdpa_paged import TorchSDPAPagedBuilder, TorchSDPAPagedImpl
from omni_attn.facts import BackendFacts, CacheFacts
from omni_attn.facts.backend import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from omni_attn.facts.kv_cache import AttentionCGSupport

__all__ = ["TorchSDPABackend", "TorchSDPAImpl"]


class TorchSDPABackend(AttentionBackend):
    """torch's scaled_dot_product_attention; serves everything, everywhere."""

    facts: ClassVar[BackendFacts] = BackendFacts(
        summary="torch scaled_dot_product_attention, kernel chosen by torch",
        dtypes=frozenset({FLOAT16, BFLOAT16, FLOAT32, FLOAT64}),
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
        tested_on=("cpu", "sm_90 (H200)"),
        paged=BackendFacts(
            summary="pages brought together, then torch's scaled_dot_product_attention",
            dtypes=frozenset({FLOAT16, BFLOAT16, FLOAT32, FLOAT64}),
            causal=True,
            gqa=True,
            packing=True,
            window=True,
            compile_mode="traceable",
            cache=CacheFacts(
                cache_dtypes=frozenset({"fp8_e4m3"}),
                causal_by_request=True,
                cudagraph=AttentionCGSupport.ALWAYS,
            ),
            tested_on=("cpu", "sm_90 (H200)"),
        ),
        mla=BackendFacts(
            summary="latents brought together, then torch's own operators in float32",
            dtypes=frozenset({FLOAT16, BFLOAT16, FLOAT32, FLOAT64}),
            value_head_size=True,
            causal=True,
            gqa=True,
            packing=True,
            lse=True,
            compile_mode="traceable",
            cache=CacheFacts(
                cache_dtypes=frozenset({"fp8_e4m3"}),
                kinds=frozenset({"mla"}),
                cudagraph=AttentionCGSupport.UNIFORM_BATCH,
            ),
            tested_on=("cpu",),
        ),
    )

    @staticmethod
    def get_name() -> str:
        """TORCH_SDPA."""
        return "TORCH_SDPA"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        """TorchSDPAImpl."""
        return TorchSDPAImpl

    @staticmethod
    def get_builder_cls() -> type[MaskedMetadataBuilder]:
        """MaskedMetadataBuilder."""
        return MaskedMetadataBuilder

    @staticmethod
    def get_paged_impl_cls() -> type[TorchSDPAPagedImpl]:
        """TorchSDPAPagedImpl."""
        return TorchSDPAPagedImpl

    @staticmethod
    def get_paged_builder_cls() -> type[TorchSDPAPagedBuilder]:
        """TorchSDPAPagedBuilder."""
        return TorchSDPAPagedBuilder

    @staticmethod
    def get_mla_impl_cls() -> type[TorchMLAImpl]:
        """TorchMLAImpl."""
        return TorchMLAImpl

    @staticmethod
    def get_mla_builder_cls() -> type[MLAMetadataBuilder]:
        """MLAMetadataBuilder."""
        return MLAMetadataBuilder
