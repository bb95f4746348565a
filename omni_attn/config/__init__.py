"""The configuration: what a person writes, checked and frozen. Loads no torch and nothing else of omni_attn.

`AttentionConfig` is the choice of a backend per role, `PipelineConfig` the whole pipeline file around it;
`load_config` and `load_pipeline` read them from files, text and mappings.
"""

from omni_attn.config.attention import AttentionConfig
from omni_attn.config.blocks import (
    AiterQuantSpec,
    BlockSparseSpec,
    FastVideoVSASpec,
    QuantSpec,
    SkipSoftmaxSpec,
)
from omni_attn.config.generation import (
    GenerationConfig,
    MiniMaxH3GenerationConfig,
    WanGenerationConfig,
)
from omni_attn.config.loading import load_config, load_pipeline
from omni_attn.config.pipeline import PipelineConfig
from omni_attn.config.spec import AttentionSpec
from omni_attn.config.tuned import TunedFor

__all__ = [
    "AiterQuantSpec",
    "AttentionConfig",
    "AttentionSpec",
    "BlockSparseSpec",
    "FastVideoVSASpec",
    "GenerationConfig",
    "MiniMaxH3GenerationConfig",
    "PipelineConfig",
    "QuantSpec",
    "SkipSoftmaxSpec",
    "TunedFor",
    "WanGenerationConfig",
    "load_config",
    "load_pipeline",
]
