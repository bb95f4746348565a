"""omni_attn: the attention layer of diffusion transformers, made selectable.

Importing this package loads nothing else; each public name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_attn.backends.metadata import AttentionMetadata, PackedPadding, VideoLayout
    from omni_attn.backends.registry import (
        DiffusionAttentionBackendEnum,
        register_diffusion_backend,
        unregister_diffusion_backend,
    )
    from omni_attn.config import AttentionConfig, AttentionSpec, load_config, load_pipeline
    from omni_attn.layer import Attention
    from omni_attn.mla_layer import MLAAttention
    from omni_attn.paged_layer import PagedAttention
    from omni_attn.preparation import prepare_attention
    from omni_attn.report import attention_report
    from omni_attn.selector import (
        collect_attention_requests,
        get_attn_backend_for_role,
        select,
        use_attention_config,
    )

__version__ = "0.1.0"

_HOME = {
    "Attention": "omni_attn.layer",
    "AttentionConfig": "omni_attn.config",
    "AttentionMetadata": "omni_attn.backends.metadata",
    "AttentionSpec": "omni_attn.config",
    "DiffusionAttentionBackendEnum": "omni_attn.backends.registry",
    "MLAAttention": "omni_attn.mla_layer",
    "PackedPadding": "omni_attn.backends.metadata",
    "PagedAttention": "omni_attn.paged_layer",
    "VideoLayout": "omni_attn.backends.metadata",
    "attention_report": "omni_attn.report",
    "collect_attention_requests": "omni_attn.selector",
    "get_attn_backend_for_role": "omni_attn.selector",
    "load_config": "omni_attn.config",
    "load_pipeline": "omni_attn.config",
    "prepare_attention": "omni_attn.preparation",
    "register_diffusion_backend": "omni_attn.backends.registry",
    "select": "omni_attn.selector",
    "unregister_diffusion_backend": "omni_attn.backends.registry",
    "use_attention_config": "omni_attn.selector",
}

__all__ = [
    "Attention",
    "AttentionConfig",
    "AttentionMetadata",
    "AttentionSpec",
    "DiffusionAttentionBackendEnum",
    "MLAAttention",
    "PackedPadding",
    "PagedAttention",
    "VideoLayout",
    "attention_report",
    "collect_attention_requests",
    "get_attn_backend_for_role",
    "load_config",
    "load_pipeline",
    "prepare_attention",
    "register_diffusion_backend",
    "select",
    "unregister_diffusion_backend",
    "use_attention_config",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'omni_attn' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
