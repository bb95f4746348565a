"""SAGE_ATTN: SageAttention, queries and keys in int8. Quantised, so never a default.

Variants, packages and modules:
    sage2   sageattention >= 2   CUDA kernels, built from source
    sage1   sageattention 1.x    Triton kernels
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.sage_kernels import (
    SAGE_FACTS,
    SAGE_VARIANTS,
    SageKernel,
    import_sage_kernel,
    sage_label,
    sage_variant,
)
from omni_attn.backends.whole import WholeImpl, WholeMetadataBuilder
from omni_attn.facts import BackendFacts, KernelFacts
from omni_attn.ops.operators import needs_operator


class SageMetadataBuilder(WholeMetadataBuilder):
    """Holds every sequence against the limits of the variant."""

    @property
    def label(self) -> str:
        """SAGE_ATTN and the variant."""
        return sage_label(self.variant)

    @property
    def kernel_facts(self) -> KernelFacts:
        """Limits of the variant."""
        return sage_variant(self.variant).facts


class SageAttentionImpl(WholeImpl):
    """One layer on an installed SageAttention."""

    backend: ClassVar[str] = "SAGE_ATTN"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.kernel: SageKernel = import_sage_kernel(self.variant)
        self.label = sage_label(self.variant)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A kernel is looked up again where a copy is loaded."""
        self.__dict__.update(state, kernel=import_sage_kernel(state["variant"]))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See WholeImpl.attend."""
        run = self.kernel.attend_op if needs_operator(query, key, value) else self.kernel.attend
        return run(query, key, value, self.softmax_scale, self.causal)


class SageAttentionBackend(AttentionBackend):
    """SageAttention 1 and 2 from their own package."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        SAGE_FACTS,
        summary="SageAttention 1 and 2, queries and keys in int8",
        variants=SAGE_VARIANTS,
        numerics="quantised",
        error="1.3e-2",
    )

    @staticmethod
    def get_name() -> str:
        """SAGE_ATTN."""
        return "SAGE_ATTN"

    @staticmethod
    def get_impl_cls() -> type[SageAttentionImpl]:
        """SageAttentionImpl."""
        return SageAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SageMetadataBuilder]:
        """SageMetadataBuilder."""
        return SageMetadataBuilder
