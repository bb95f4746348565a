"""Device families: facts of the machine, and the policy that goes with them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from omni_attn.backends import registry
from omni_attn.facts import DeviceInfo
from omni_attn.facts.packages import read_build_flags
from omni_attn.platforms.cuda import CudaPlatform
from omni_attn.platforms.families import FAMILIES, family_class_paths
from omni_attn.platforms.interface import OmniPlatform, OrderRow
from omni_attn.platforms.others import (
    CpuPlatform,
    MpsPlatform,
    MusaPlatform,
    NpuPlatform,
    RocmPlatform,
    XpuPlatform,
)

if TYPE_CHECKING:
    import torch

__all__ = ["CpuPlatform", "CudaPlatform", "MpsPlatform", "MusaPlatform", "NpuPlatform", "OmniPlatform"]
__all__ += ["OrderRow", "RocmPlatform", "XpuPlatform"]
__all__ += ["current_omni_platform", "family_class_paths", "reset_device_facts"]


def current_omni_platform(
    device: str | torch.device | DeviceInfo | OmniPlatform | None = None,
) -> OmniPlatform:
    """The platform of a device.

    Args:
        device: a device of this machine ("cuda:0", torch.device), assumed facts, or a platform, which comes back as
            it is; None = this machine's best accelerator, else its CPU.

    Facts of this machine are read once; call `reset_device_facts()` after installing or removing a package.
    """
    if isinstance(device, OmniPlatform):
        return device
    if isinstance(device, DeviceInfo):
        return _platform(device)
    return _platform(_detected(None if device is None else str(device), registry.generation()))


def reset_device_facts() -> None:
    """Forgets what was read from this machine, so that newly installed or removed packages and plug-ins are seen."""
    registry.refresh()
    _detected.cache_clear()
    read_build_flags.cache_clear()


@functools.lru_cache(maxsize=256)
def _platform(device: DeviceInfo) -> OmniPlatform:
    return FAMILIES.get(device.kind, CpuPlatform)(device)


@functools.lru_cache(maxsize=64)
def _detected(device: str | None, registry_generation: int) -> DeviceInfo:
    from omni_attn.platforms.detect import device_info

    return device_info(device)
