"""Facts as data, and the one function that judges them. Nothing in this package imports torch."""

from omni_attn.facts.backend import (
    BackendFacts,
    CapabilityHeadSizes,
    CapabilityRange,
    CudnnFloor,
    HeadSizes,
    KernelFacts,
    Variant,
)
from omni_attn.facts.device import DeviceCapability, DeviceInfo
from omni_attn.facts.evaluate import choose_variant, evaluate
from omni_attn.facts.packages import BuildFlag, PackageRequirement
from omni_attn.facts.request import AttentionRequest
from omni_attn.facts.verdict import Verdict

__all__ = [
    "AttentionRequest",
    "BackendFacts",
    "BuildFlag",
    "CapabilityHeadSizes",
    "CapabilityRange",
    "CudnnFloor",
    "DeviceCapability",
    "DeviceInfo",
    "HeadSizes",
    "KernelFacts",
    "PackageRequirement",
    "Variant",
    "Verdict",
    "choose_variant",
    "evaluate",
]
