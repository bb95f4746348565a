"""The line that says where a figure was measured, and how."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from omni_attn.platforms.detect import processor_name
from omni_attn.tuning.clocks import method_of

PEERS = (
    "diffusers",
    "fa3-fwd",
    "tokenspeed-fa3",
    "flash-attn",
    "flash-attn-4",
    "flashinfer-python",
    "fastvideo-kernel",
    "h3-sparse-attn",
    "triton",
)


def measured_line(device: torch.device, rounds: int, seed: int) -> str:
    """The machine, and how candidates were timed on it."""
    return f"{machine_line(device.type)}; {method_of(device)}; {rounds} shuffled rounds, medians; seed {seed}"


def machine_line(device: str) -> str:
    """Device, software versions and date, for instance to head a table."""
    name = torch.cuda.get_device_name() if device == "cuda" else processor_name() or platform.machine()
    found = [f"torch {torch.__version__}"]
    if device == "cuda":
        found.append(f"cuDNN {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
    for package in PEERS:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{name}, Python {platform.python_version()}, {', '.join(found)}, {datetime.date.today()}"
