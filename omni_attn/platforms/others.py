"""Families without hardware at hand: one class each, and one table of what replaces FLASH_ATTN there.

No order of this file was measured by us: the hand-written kernel of a family stands before torch's own attention,
as vLLM-Omni has it on the same hardware. Whether it runs is up to its facts; where it does not, torch's attention does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from omni_attn.facts import AttentionRequest
from omni_attn.platforms.interface import OmniPlatform

_OWN_FLASH_FIRST = ("FLASH_ATTN", "TORCH_SDPA")
# None of their FLASH_ATTN reads pages; our Triton kernels run on those families that Triton has a compiler for.
_PAGED = ("TRITON_ATTN", "TORCH_SDPA")


class CpuPlatform(OmniPlatform):
    """CPUs, and every device family that nobody wrote a policy for."""


class MpsPlatform(OmniPlatform):
    """Apple GPUs: torch's own attention, the only one that runs there."""


class FlashPlatform(OmniPlatform):
    """A family with a FLASH_ATTN of its own, tried before torch's attention; over pages, our own kernels are."""

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        """See OmniPlatform.default_order."""
        return _OWN_FLASH_FIRST if request.kv_cache is None else _PAGED


class RocmPlatform(FlashPlatform):
    """AMD GPUs: aiter on gfx942 and gfx950."""

    class_paths: ClassVar[Mapping[str, str]] = {
        "FLASH_ATTN": "omni_attn.backends.flash_attn_rocm.AiterFlashBackend"
    }


class NpuPlatform(FlashPlatform):
    """Huawei Ascend NPUs: MindIE-SD."""

    class_paths: ClassVar[Mapping[str, str]] = {
        "FLASH_ATTN": "omni_attn.backends.flash_attn_npu.MindieFlashBackend"
    }


class XpuPlatform(FlashPlatform):
    """Intel GPUs: vllm-xpu-kernels, on all but the Data Center GPU Max series."""

    class_paths: ClassVar[Mapping[str, str]] = {
        "FLASH_ATTN": "omni_attn.backends.flash_attn_xpu.XpuFlashBackend"
    }


class MusaPlatform(FlashPlatform):
    """Moore Threads GPUs: mate from compute capability 3.1 on."""

    class_paths: ClassVar[Mapping[str, str]] = {
        "FLASH_ATTN": "omni_attn.backends.flash_attn_musa.MateFlashBackend"
    }
