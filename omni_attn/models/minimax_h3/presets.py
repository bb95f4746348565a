"""MiniMax-H3 pipelines by name: a transformer, and how it is sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.schedule import FASTH3_V2_PLAN, MINIMAX_H3_PLAN, SamplingPlan


@dataclass(frozen=True, kw_only=True)
class MiniMaxH3Preset:
    """A MiniMax-H3 pipeline: its transformer, the plan it is sampled after, and the name in configurations."""

    name: str
    transformer: MiniMaxH3Config
    plan: SamplingPlan


_H3 = MiniMaxH3Config(
    num_attention_heads=56,
    attention_head_dim=128,
    hidden_size=5376,
    num_layers=50,
    num_refiner_layers=2,
    ffn_dim=14336,
    in_channels=24,
    audio_in_channels=32,
    patch_size=(1, 2, 2),
    text_dim=5120,
    freq_dim=256,
    time_embed_hidden_dim=5376,
    time_embed_dim=2688,
    rope_freq_dim=16,
    rope_theta=10000.0,
    norm_eps=1e-5,
    qk_norm_eps=1e-5,
    final_norm_eps=1e-5,
)
# As in the released model, heads together are wider than the residual stream, and three quarters of a head turn.
_TINY = dataclasses.replace(
    _H3,
    num_attention_heads=8,
    attention_head_dim=32,
    hidden_size=192,
    num_layers=4,
    ffn_dim=256,
    text_dim=64,
    freq_dim=64,
    time_embed_hidden_dim=96,
    time_embed_dim=48,
    rope_freq_dim=4,
)


def _gated(transformer: MiniMaxH3Config) -> MiniMaxH3Config:
    return dataclasses.replace(transformer, gate_compress=True)


# FastH3: gates of video sparse attention, and its second version's 8 forwards.
MINIMAX_H3_PRESETS: Mapping[str, MiniMaxH3Preset] = MappingProxyType(
    {
        name: MiniMaxH3Preset(name=name, transformer=transformer, plan=plan)
        for name, transformer, plan in (
            ("minimax-h3", _H3, MINIMAX_H3_PLAN),
            ("fasth3", _gated(_H3), FASTH3_V2_PLAN),
            ("minimax-h3-tiny", _TINY, MINIMAX_H3_PLAN),
            ("fasth3-tiny", _gated(_TINY), FASTH3_V2_PLAN),
        )
    }
)
