"""The line that says where something was measured."""

from __future__ import annotations

import datetime
import platform as python_platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from omni_attn.facts import DeviceInfo


def machine_line(device: DeviceInfo) -> str:
    """Device, software versions and date in one line, for instance to head a table."""
    name = device.name if device.product is None else f"{device.product} ({device.name})"
    found = [f"Python {python_platform.python_version()}", f"torch {device.torch_version}"]
    if device.cudnn_text is not None:
        found.append(f"cuDNN {device.cudnn_text}")
    if "triton" not in device.packages:
        with suppress(PackageNotFoundError):
            found.append(f"triton {version('triton')}")
    found += [f"{package} {number}" for package, number in device.packages.items()]
    return f"{name}, {', '.join(found)}, {datetime.date.today()}"
