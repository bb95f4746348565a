"""Wan 2.1 and 2.2: text, image and first-last-frame to video, with every attention call behind a role.

Public: WanModel, WanConfig, WanPreset, WAN_PRESETS, Wan22Pipeline; each is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_attn.models.wan.config import WanConfig
    from omni_attn.models.wan.model import WanModel
    from omni_attn.models.wan.pipeline import Wan22Pipeline
    from omni_attn.models.wan.presets import WAN_PRESETS, WanPreset

_HOME = {
    "WAN_PRESETS": "presets",
    "Wan22Pipeline": "pipeline",
    "WanConfig": "config",
    "WanModel": "model",
    "WanPreset": "presets",
}

__all__ = ["WAN_PRESETS", "Wan22Pipeline", "WanConfig", "WanModel", "WanPreset"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
