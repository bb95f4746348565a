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
from omni_attn.facts.kv_cache import (
    AttentionCGSupport,
    CacheFacts,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    MultipleOf,
    SlidingWindowSpec,
)
from omni_attn.facts.packages import BuildFlag, PackageRequirement
from omni_attn.facts.request import AttentionRequest
from omni_attn.facts.verdict import Verdict

__all__ = [
    "AttentionCGSupport",
    "AttentionRequest",
    "BackendFacts",
    "BuildFlag",
    "CacheFacts",
    "CapabilityHeadSizes",
    "CapabilityRange",
    "CudnnFloor",
    "DeviceCapability",
    "DeviceInfo",
    "FullAttentionSpec",
    "HeadSizes",
    "KVCacheSpec",
    "KernelFacts",
    "MLAAttentionSpec",
    "MultipleOf",
    "PackageRequirement",
    "SlidingWindowSpec",
    "Variant",
    "Verdict",
    "choose_variant",
    "evaluate",
]
