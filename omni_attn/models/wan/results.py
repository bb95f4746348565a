"""What a Wan run writes: latents, frames if a VAE can decode them, and a contact sheet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from omni_attn.config import PipelineConfig, WanGenerationConfig
from omni_attn.models.artifacts import save_latents
from omni_attn.models.family import generation_as
from omni_attn.models.results import caption_lines, result_header, write_pictures
from omni_attn.models.wan.pixels import decode_latents
from omni_attn.models.wan.source import WanSource
from omni_attn.report import attention_report


def write_results(
    folder: Path,
    latents: torch.Tensor,
    config: PipelineConfig,
    source: WanSource,
    vae: Any | None,
    model: nn.Module,
    scheduler_name: str,
    notes: tuple[str, ...],
) -> tuple[Path, ...]:
    """Write everything into the folder; the paths, in the order of writing.

    Latents come first: they are what took the time. `latents.safetensors` holds them in float32 under "latents" with
    the header entries model, seed, steps, scheduler and attention (JSON: what each role ran).

    Args:
        folder: exists.
        latents: [1, C, T, H, W], normalised.
        config: what was asked for.
        source: the pipeline's description.
        vae: what decodes the latents; None shows them as they are.
        model: every transformer that ran.
        scheduler_name: class of the sampler.
        notes: what was filled in; the sheet's caption repeats them.
    """
    report = attention_report(model)
    header = result_header(config, report, scheduler_name)
    files = [save_latents(folder / "latents.safetensors", latents, header)]
    video = None if vae is None else decode_latents(vae, latents)
    caption = [*caption_lines(config, report, scheduler_name, _guidance(config)), *notes]
    files += write_pictures(folder, latents[0], video, title=source.name, caption=caption)
    return tuple(files)


def _guidance(config: PipelineConfig) -> str:
    generation = generation_as(config, WanGenerationConfig)
    guidance = f"guidance {generation.guidance_scale:g}"
    if generation.guidance_scale_2 is not None:
        guidance += f" and {generation.guidance_scale_2:g}"
    return guidance
