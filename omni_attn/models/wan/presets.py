"""The published Wan pipelines by name: their transformers, and what the pipeline around them must know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from omni_attn.models.wan.config import CLIP_TOKENS, WanConfig

DMD_FLOW_SHIFT = 8.0  # of the schedule that FastWan checkpoints were distilled on


@dataclass(frozen=True, kw_only=True)
class WanPreset:
    """A published Wan pipeline: its transformer(s), and what the pipeline around them must know.

    `boundary_ratio` is the fraction of the 1000 training steps from which the high-noise expert works (None:
    one expert). `expand_timesteps`: every token has its own timestep (TI2V). `flow_shift` is the scheduler's
    shift. `vae_spatial` and `vae_temporal` are pixels and frames per latent pixel and latent frame. `is_dmd`: distilled
    to a few steps, see `omni_attn.models.wan.dmd`. An image-conditioned model with 36 input channels reads [latent 16,
    mask 4, condition latent 16] in that order.
    """

    name: str
    transformer: WanConfig
    boundary_ratio: float | None
    expand_timesteps: bool
    vae_spatial: int
    vae_temporal: int
    flow_shift: float
    is_dmd: bool = False

    @property
    def num_experts(self) -> int:
        return 1 if self.boundary_ratio is None else 2


def _wan(
    heads: int, ffn_dim: int, layers: int, *, in_channels: int = 16, out_channels: int = 16
) -> WanConfig:
    return WanConfig(
        patch_size=(1, 2, 2),
        num_attention_heads=heads,
        attention_head_dim=128,
        in_channels=in_channels,
        out_channels=out_channels,
        text_dim=4096,
        freq_dim=256,
        ffn_dim=ffn_dim,
        num_layers=layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        eps=1e-6,
        image_dim=None,
        added_kv_proj_dim=None,
        rope_max_seq_len=1024,
        pos_embed_seq_len=None,
    )


def _gated(transformer: WanConfig) -> WanConfig:
    return dataclasses.replace(transformer, gate_compress=True)


def _preset(
    name: str,
    transformer: WanConfig,
    *,
    flow_shift: float,
    boundary_ratio: float | None = None,
    expand_timesteps: bool = False,
    vae_spatial: int = 8,
    is_dmd: bool = False,
) -> WanPreset:
    return WanPreset(
        name=name,
        transformer=transformer,
        boundary_ratio=boundary_ratio,
        expand_timesteps=expand_timesteps,
        vae_spatial=vae_spatial,
        vae_temporal=4,
        flow_shift=flow_shift,
        is_dmd=is_dmd,
    )


_T2V_1_3B = _wan(12, 8960, 30)
_T2V_14B = _wan(40, 13824, 40)
_I2V_A14B = _wan(40, 13824, 40, in_channels=36)  # 2.2 conditions on channels alone
_I2V_14B = dataclasses.replace(_I2V_A14B, image_dim=1280, added_kv_proj_dim=5120)
_FLF2V_14B = dataclasses.replace(_I2V_14B, pos_embed_seq_len=2 * CLIP_TOKENS)
_TINY = dataclasses.replace(_wan(4, 256, 4), attention_head_dim=32, text_dim=64, freq_dim=64)

# Shifts are those of 480p, except the first-last-frame and A14B models, which were published for 720p.
WAN_PRESETS: Mapping[str, WanPreset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            _preset("wan2.1-t2v-1.3b", _T2V_1_3B, flow_shift=3.0),
            _preset("wan2.1-t2v-14b", _T2V_14B, flow_shift=3.0),
            _preset("wan2.1-i2v-14b", _I2V_14B, flow_shift=3.0),
            _preset("wan2.1-flf2v-14b", _FLF2V_14B, flow_shift=5.0),
            _preset("wan2.2-t2v-a14b", _T2V_14B, flow_shift=12.0, boundary_ratio=0.875),
            _preset("wan2.2-i2v-a14b", _I2V_A14B, flow_shift=5.0, boundary_ratio=0.9),
            _preset(
                "wan2.2-ti2v-5b",
                _wan(24, 14336, 30, in_channels=48, out_channels=48),
                flow_shift=5.0,
                expand_timesteps=True,
                vae_spatial=16,
            ),
            _preset("fastwan2.1-t2v-1.3b", _gated(_T2V_1_3B), flow_shift=DMD_FLOW_SHIFT, is_dmd=True),
            _preset("wan-tiny", _TINY, flow_shift=3.0),
            _preset("fastwan-tiny", _gated(_TINY), flow_shift=DMD_FLOW_SHIFT, is_dmd=True),
        )
    }
)
