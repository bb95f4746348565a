"""Wan video chunk by chunk: each chunk of latent frames attends to itself and to a paged cache of those before it.

Public: CachePlan, CausalCache, CausalVideo, CausalWanModel, CausalWanPipeline; each is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_attn.models.wan.causal.cache import CausalCache
    from omni_attn.models.wan.causal.model import CausalWanModel
    from omni_attn.models.wan.causal.pipeline import CausalWanPipeline
    from omni_attn.models.wan.causal.plan import CachePlan
    from omni_attn.models.wan.causal.video import CausalVideo

_HOME = {
    "CachePlan": "plan",
    "CausalCache": "cache",
    "CausalVideo": "video",
    "CausalWanModel": "model",
    "CausalWanPipeline": "pipeline",
}

__all__ = ["CachePlan", "CausalCache", "CausalVideo", "CausalWanModel", "CausalWanPipeline"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
