"""Small Wan models with seeded weights that are far from zero, ours and diffusers', and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.loading import keeps_float32
from omni_attn.models.wan.model import WanModel

BASE: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "freq_dim": 256,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 32,
    "pos_embed_seq_len": None,
}
# What each kind of Wan adds. CLIP tokens are 7 for one picture, 10 for two.
KINDS: dict[str, dict[str, Any]] = {
    "t2v": {},
    "t2v_head24": {"attention_head_dim": 24},
    "ti2v": {},
    "i2v": {"in_channels": 9, "image_dim": 6, "added_kv_proj_dim": 24},
    "flf2v": {"in_channels": 9, "image_dim": 6, "added_kv_proj_dim": 24, "pos_embed_seq_len": 10},
    "i2v_2.2": {"in_channels": 9},
}
BATCH, LATENT, TOKENS, TEXT_TOKENS = 2, (3, 4, 6), 18, 512


def config_of(kind: str) -> WanConfig:
    return WanConfig(**(BASE | KINDS[kind]))


def seed_weights(model: nn.Module, seed: int = 0) -> None:
    """Fresh transformers start with small or zero weights, which would hide a wrong order of parts."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2, generator=generator)


def build_reference(kind: str) -> WanTransformer3DModel:
    reference = WanTransformer3DModel(**(BASE | KINDS[kind])).eval()
    seed_weights(reference)
    return reference


def build_model(kind: str) -> WanModel:
    model = WanModel(config_of(kind)).eval()
    seed_weights(model)
    return model


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if keeps_float32(name) else dtype)


def build_inputs(
    kind: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Latent, timestep, text and image tokens of one call, as forward takes them."""
    config = config_of(kind)
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    timestep = torch.tensor([999.0, 20.5])
    if kind == "ti2v":
        timestep = timestep[:, None].expand(BATCH, TOKENS).clone()
        timestep[:, : TOKENS // LATENT[0]] = 0
    image = {"i2v": (BATCH, 7, 6), "flf2v": (2 * BATCH, 5, 6)}.get(kind)
    latent = noise(BATCH, config.in_channels, *LATENT)
    text = noise(BATCH, TEXT_TOKENS, config.text_dim)
    return latent, timestep, text, None if image is None else noise(*image)
