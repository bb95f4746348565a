"""FLASH_ATTN on Intel GPUs, through vllm-xpu-kernels.

Variant, package and module:
    vllm-xpu-kernels   vllm-xpu-kernels   vllm_xpu_kernels.flash_attn_interface.flash_attn_varlen_func

Written after the sources of vllm-project/vllm-xpu-kernels. There is one function, for packed sequences: a dense
batch is packed by its shape. The order of its arguments differs from FlashAttention's, so all go by keyword.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import ClassVar

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.flash_families import FamilyFlashBuilder, FamilyFlashImpl
from omni_attn.backends.flash_packages import FLASH_FACTS
from omni_attn.facts import BackendFacts, HeadSizes, PackageRequirement, Variant

XPU_PACKAGE = PackageRequirement(
    distribution="vllm-xpu-kernels",
    module="vllm_xpu_kernels.flash_attn_interface",
    symbols=("flash_attn_varlen_func",),
)
_FACTS = replace(
    FLASH_FACTS,
    device_kinds=frozenset({"xpu"}),
    excluded_architectures=frozenset({"pvc"}),
    packages=(XPU_PACKAGE,),
    head_sizes=HeadSizes(allowed=(64, 128, 192, 256)),
    lse=False,
    backward=False,
    cudagraph=False,
    sequence_parallel=frozenset({"ulysses", "allgather_kv"}),
)


class XpuFlashImpl(FamilyFlashImpl):
    """One layer on vllm-xpu-kernels."""

    package: ClassVar[PackageRequirement] = XPU_PACKAGE
    dense_function: ClassVar[str] = "flash_attn_varlen_func"

    def forward_with_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """There is none: nobody has held what the package returns against a reference yet."""
        raise TypeError(
            "FLASH_ATTN (vllm-xpu-kernels) gives no LSE: its facts say lse=False; choose a backend that has it"
        )

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The whole batch as packed sequences of one length."""
        compiling = torch.compiler.is_compiling()
        bounds = _bounds if compiling else _kept_bounds
        run = self.kernel.varlen_op if compiling else self.kernel.varlen
        output_THD = run(
            query.flatten(0, 1),
            key.flatten(0, 1),
            value.flatten(0, 1),
            bounds(query.shape[0], query.shape[1], query.device),
            bounds(key.shape[0], key.shape[1], key.device),
            query.shape[1],
            key.shape[1],
            self.softmax_scale,
            self.causal,
            self._window,
        )
        return output_THD.view(*query.shape[:3], value.shape[-1])


def _bounds(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Boundaries of `batch` sequences of one length: int32 [B + 1]."""
    return torch.arange(batch + 1, device=device, dtype=torch.int32) * length


# A model calls with a handful of shapes, step after step.
_kept_bounds = functools.lru_cache(maxsize=64)(_bounds)


class XpuFlashBackend(AttentionBackend):
    """FlashAttention 2 of vllm-xpu-kernels."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        _FACTS,
        summary="FlashAttention of vllm-xpu-kernels, for Intel GPUs",
        variants=(Variant(name="vllm-xpu-kernels", facts=_FACTS),),
    )

    @staticmethod
    def get_name() -> str:
        """FLASH_ATTN."""
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type[XpuFlashImpl]:
        """XpuFlashImpl."""
        return XpuFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FamilyFlashBuilder]:
        """FamilyFlashBuilder."""
        return FamilyFlashBuilder
