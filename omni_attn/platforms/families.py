"""The device families that have a policy, by DeviceInfo.kind, and the classes that some of them bring for a name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from omni_attn.platforms.cuda import CudaPlatform
from omni_attn.platforms.interface import OmniPlatform
from omni_attn.platforms.others import (
    CpuPlatform,
    MpsPlatform,
    MusaPlatform,
    NpuPlatform,
    RocmPlatform,
    XpuPlatform,
)

FAMILIES: Mapping[str, type[OmniPlatform]] = MappingProxyType(
    {
        "cuda": CudaPlatform,
        "rocm": RocmPlatform,
        "npu": NpuPlatform,
        "xpu": XpuPlatform,
        "musa": MusaPlatform,
        "mps": MpsPlatform,
        "cpu": CpuPlatform,
    }
)


def family_class_paths() -> tuple[tuple[str, str, str], ...]:
    """(family, backend name, class path) of each class that a family uses in place of the built-in one."""
    return tuple(
        (kind, name, path)
        for kind, platform in FAMILIES.items()
        for name, path in platform.class_paths.items()
    )
