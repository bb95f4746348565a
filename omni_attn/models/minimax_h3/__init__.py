"""MiniMax-H3: video and sound from text, keyframes and references, with attention that the model owns.

Public: the names in `__all__`, each imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_attn.models.minimax_h3.conditions import Keyframes, Prompt
    from omni_attn.models.minimax_h3.config import MiniMaxH3Config
    from omni_attn.models.minimax_h3.model import MiniMaxH3Model
    from omni_attn.models.minimax_h3.packing import (
        AudioReference,
        ImageReference,
        VideoReference,
        pack_fl2va,
        pack_ref2va,
        pack_t2va,
    )
    from omni_attn.models.minimax_h3.patches import patchify, unpatchify
    from omni_attn.models.minimax_h3.pipeline import MiniMaxH3Pipeline
    from omni_attn.models.minimax_h3.presets import MINIMAX_H3_PRESETS, MiniMaxH3Preset
    from omni_attn.models.minimax_h3.schedule import (
        FASTH3_V1_PLAN,
        FASTH3_V2_PLAN,
        MINIMAX_H3_PLAN,
        SamplingPlan,
    )
    from omni_attn.models.minimax_h3.sequence import PackedSequence

_HOME = {
    "FASTH3_V1_PLAN": "schedule",
    "FASTH3_V2_PLAN": "schedule",
    "MINIMAX_H3_PLAN": "schedule",
    "MINIMAX_H3_PRESETS": "presets",
    "AudioReference": "packing",
    "ImageReference": "packing",
    "Keyframes": "conditions",
    "MiniMaxH3Config": "config",
    "MiniMaxH3Model": "model",
    "MiniMaxH3Pipeline": "pipeline",
    "MiniMaxH3Preset": "presets",
    "PackedSequence": "sequence",
    "Prompt": "conditions",
    "SamplingPlan": "schedule",
    "VideoReference": "packing",
    "pack_fl2va": "packing",
    "pack_ref2va": "packing",
    "pack_t2va": "packing",
    "patchify": "patches",
    "unpatchify": "patches",
}

__all__ = [
    "FASTH3_V1_PLAN",
    "FASTH3_V2_PLAN",
    "MINIMAX_H3_PLAN",
    "MINIMAX_H3_PRESETS",
    "AudioReference",
    "ImageReference",
    "Keyframes",
    "MiniMaxH3Config",
    "MiniMaxH3Model",
    "MiniMaxH3Pipeline",
    "MiniMaxH3Preset",
    "PackedSequence",
    "Prompt",
    "SamplingPlan",
    "VideoReference",
    "pack_fl2va",
    "pack_ref2va",
    "pack_t2va",
    "patchify",
    "unpatchify",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
