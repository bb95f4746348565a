"""Devices that are not here: a machine as an argument, for explanations and tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError
from omni_attn.facts import DeviceCapability, DeviceInfo

ASSUMED_NAMES = (
    *("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"),
    *("gfx942", "gfx950", "gfx1100", "npu", "xpu", "musa", "mps", "cpu"),
)
#: What an assumed "musa" is: the first capability that mate has kernels for.
MUSA_CAPABILITY = DeviceCapability(3, 1)
#: Name of the Intel Data Center GPU Max series.
PONTE_VECCHIO = "pvc"


def assumed_device(
    name: str,
    packages: Mapping[str, str] | None = None,
    cudnn: int | None = None,
    torch_version: str | None = None,
) -> DeviceInfo:
    """Facts of an assumed device.

    Args:
        name: "sm_90" and the like (compute capability without the dot), "gfx942", "npu", "xpu", "pvc" (an Intel Data
            Center GPU Max), "musa" (compute capability 3.1) or "musa_22" and the like, "mps", "cpu".
        packages: distribution name -> version; None or empty = none is installed, whatever this machine has.
        cudnn: cuDNN version as torch writes it (91900), None = none; ignored where the device is no CUDA device.

    Raises:
        ConfigError: no such device is known.
    """
    common: dict[str, Any] = {"name": name, "packages": packages or {}, "torch_version": torch_version}
    if match := re.fullmatch(r"sm_(\d+)(\d)", name):
        capability = DeviceCapability(int(match[1]), int(match[2]))
        return DeviceInfo(kind="cuda", capability=capability, cudnn=cudnn, **common)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", name):
        return DeviceInfo(kind="rocm", **common)
    if match := re.fullmatch(r"musa(?:_(\d)(\d))?", name):
        capability = DeviceCapability(int(match[1]), int(match[2])) if match[1] else MUSA_CAPABILITY
        return DeviceInfo(kind="musa", capability=capability, **common)
    if name == PONTE_VECCHIO:
        return DeviceInfo(kind="xpu", **common)
    if name in ASSUMED_NAMES:
        return DeviceInfo(kind=name, **common)
    near = nearest(name, ASSUMED_NAMES)
    hint = f" Did you mean {near!r}?" if near else ""
    raise ConfigError(
        f"unknown device {name!r}.{hint} Known: {', '.join(ASSUMED_NAMES)}, {PONTE_VECCHIO}, and any "
        "other sm_XY, gfxNNN or musa_XY."
    )
