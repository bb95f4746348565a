"""Whole MiniMax-H3 pipelines, small and seeded: ours, and diffusers' modular one around the same weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
from torch import Tensor

from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.models.minimax_h3.presets import MINIMAX_H3_PRESETS
from omni_attn.models.minimax_h3.seeded import materialise_seeded
from omni_attn.models.minimax_h3.sizes import audio_latents, latent_size

FRAMES, HEIGHT, WIDTH = 124, 64, 96  # the shortest video that diffusers' pipeline makes
LATENT, SOUNDS = latent_size(FRAMES, HEIGHT, WIDTH), audio_latents(FRAMES)
TEXT_ROWS = 7


@cache
def build_transformer(preset: str = "minimax-h3-tiny") -> MiniMaxH3Model:
    with torch.device("meta"):
        model = MiniMaxH3Model(MINIMAX_H3_PRESETS[preset].transformer)
    return materialise_seeded(model, torch.Generator().manual_seed(3), "float32")


@cache
def build_reference() -> MiniMaxH3Transformer3DModel:
    model = build_transformer()
    reference = MiniMaxH3Transformer3DModel(**model.config.to_diffusers()).eval()
    reference.load_state_dict(model.state_dict())
    return reference


def run_reference(blocks: Any, *, transformer: str = "transformer", **inputs: Any) -> tuple[Tensor, Tensor]:
    """Video [1, C, T, H, W] and sound [1, 2, C, A] of diffusers' blocks around the reference."""
    pipeline = blocks.init_pipeline()
    pipeline.update_components(
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
        **{transformer: build_reference()},
    )
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(**inputs, output=["latents", "audio_latents"])
    return made["latents"], made["audio_latents"][None]


def text(rows: int = TEXT_ROWS, seed: int = 11) -> Tensor:
    width = MINIMAX_H3_PRESETS["minimax-h3-tiny"].transformer.text_dim
    return torch.randn(1, rows, width, generator=torch.Generator().manual_seed(seed))


def noise(batch: int = 1, seed: int = 5, latent: tuple[int, int, int] = LATENT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    video = torch.randn(batch, 24, *latent, generator=generator)
    rows = torch.randn(batch, 2 * SOUNDS, 32, generator=generator)
    return video, rows.unflatten(1, (2, -1)).transpose(2, 3)
