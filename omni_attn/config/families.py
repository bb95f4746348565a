"""Families of pipelines, and what each is asked to generate."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from omni_attn.config.generation import MiniMaxH3GenerationConfig, WanGenerationConfig
from omni_attn.config.wan_causal import WanCausalGenerationConfig

#: In the order of FAMILIES.
Generation = WanGenerationConfig | WanCausalGenerationConfig | MiniMaxH3GenerationConfig

FAMILIES: Mapping[str, type[Generation]] = MappingProxyType(
    {
        "wan": WanGenerationConfig,
        "wan_causal": WanCausalGenerationConfig,
        "minimax_h3": MiniMaxH3GenerationConfig,
    }
)
"""What each name that `pipeline` may have is asked to generate."""
