"""FLASH_ATTN on AMD GPUs, through aiter.

Variant, package and module:
    aiter   amd-aiter   aiter.flash_attn_func, aiter.flash_attn_varlen_func

Written after the sources of ROCm/aiter (aiter/ops/mha.py and its tests). They return the log-sum-exp with
`return_lse`, not with FlashAttention's `return_attn_probs`. Windows are left out: its dispatcher takes windows of
zero tokens on one side for none. The distribution `aiter` of the package index is another project.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.flash_families import FamilyFlashBuilder, FamilyFlashImpl
from omni_attn.backends.flash_packages import FLASH_FACTS, Convention
from omni_attn.facts import BackendFacts, PackageRequirement, Variant

AITER_PACKAGE = PackageRequirement(
    distribution="amd-aiter", module="aiter", symbols=("flash_attn_func", "flash_attn_varlen_func")
)
_FACTS = replace(
    FLASH_FACTS,
    device_kinds=frozenset({"rocm"}),
    architectures=frozenset({"gfx942", "gfx950"}),
    packages=(AITER_PACKAGE,),
    window=False,
    backward=False,
    cudagraph=False,
)


class AiterFlashImpl(FamilyFlashImpl):
    """One layer on aiter."""

    package: ClassVar[PackageRequirement] = AITER_PACKAGE
    convention: ClassVar[Convention] = Convention(lse_keyword="return_lse")


class AiterFlashBackend(AttentionBackend):
    """FlashAttention of aiter, on gfx942 and gfx950."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        _FACTS,
        summary="FlashAttention of aiter, for AMD gfx942 and gfx950",
        variants=(Variant(name="aiter", facts=_FACTS),),
    )

    @staticmethod
    def get_name() -> str:
        """FLASH_ATTN."""
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type[AiterFlashImpl]:
        """AiterFlashImpl."""
        return AiterFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FamilyFlashBuilder]:
        """FamilyFlashBuilder."""
        return FamilyFlashBuilder
