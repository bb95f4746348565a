"""FLASH_ATTN on Moore Threads GPUs, through mate.

Variant, package and module:
    mate   mate (built from MooreThreads/mate)   mate.flash_attn_varlen_func

Written after the sources of MooreThreads/mate (mate/mha_interface.py): one function with FlashAttention 3's
arguments, which takes [B, S, H, D] tensors where it gets no boundaries. The distribution `mate` of the package index is
another project.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.flash_families import FamilyFlashBuilder, FamilyFlashImpl
from omni_attn.backends.flash_packages import FLASH_FACTS
from omni_attn.facts import BackendFacts, CapabilityRange, PackageRequirement, Variant

MATE_PACKAGE = PackageRequirement(
    distribution="mate",
    module="mate",
    symbols=("flash_attn_varlen_func",),
    install="pip install --no-build-isolation git+https://github.com/MooreThreads/mate",
)
_FACTS = replace(
    FLASH_FACTS,
    device_kinds=frozenset({"musa"}),
    capabilities=(CapabilityRange(minimum=(3, 1)),),
    packages=(MATE_PACKAGE,),
    backward=False,
    cudagraph=False,
)


class MateFlashImpl(FamilyFlashImpl):
    """One layer on mate."""

    package: ClassVar[PackageRequirement] = MATE_PACKAGE
    dense_function: ClassVar[str] = "flash_attn_varlen_func"


class MateFlashBackend(AttentionBackend):
    """FlashAttention of mate, from compute capability 3.1 on."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        _FACTS,
        summary="FlashAttention of mate, for Moore Threads GPUs",
        variants=(Variant(name="mate", facts=_FACTS),),
    )

    @staticmethod
    def get_name() -> str:
        """FLASH_ATTN."""
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type[MateFlashImpl]:
        """MateFlashImpl."""
        return MateFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FamilyFlashBuilder]:
        """FamilyFlashBuilder."""
        return FamilyFlashBuilder
