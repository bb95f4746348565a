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
    WanRequest,
)
from omni_attn.config.kv_cache import KVCacheConfig
from omni_attn.config.loading import load_config, load_pipeline
from omni_attn.config.parallel import ParallelConfig
from omni_attn.config.pipeline import PipelineConfig
from omni_attn.config.spec import AttentionSpec
from omni_attn.config.tuned import TunedFor
from omni_attn.config.wan_causal import WanCausalGenerationConfig

__all__ = [
    "AiterQuantSpec",
    "AttentionConfig",
    "AttentionSpec",
    "BlockSparseSpec",
    "FastVideoVSASpec",
    "GenerationConfig",
    "KVCacheConfig",
    "MiniMaxH3GenerationConfig",
    "ParallelConfig",
    "PipelineConfig",
    "QuantSpec",
    "SkipSoftmaxSpec",
    "TunedFor",
    "WanCausalGenerationConfig",
    "WanGenerationConfig",
    "WanRequest",
    "load_config",
    "load_pipeline",
]
