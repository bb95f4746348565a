"""What a Wan run writes: latents, frames if a VAE can decode them, and a contact sheet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omni_attn.config import PipelineConfig
from omni_attn.models.artifacts import (
    latents_to_frames,
    save_contact_sheet,
    save_frames,
    save_latents,
    video_to_frames,
)
from omni_attn.models.wan.pixels import decode_latents
from omni_attn.models.wan.source import WanSource
from omni_attn.report import AttentionReport, attention_report


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
    metadata = {
        "model": config.model,
        "seed": str(config.generation.seed),
        "steps": str(config.generation.num_inference_steps),
        "scheduler": scheduler_name,
        "attention": json.dumps(report.to_dict()),
    }
    files = [save_latents(folder / "latents.safetensors", latents, metadata)]
    caption = [*_caption(config, scheduler_name, report), *notes]
    if vae is not None:
        frames = video_to_frames(decode_latents(vae, latents))
        files += save_frames(folder, frames)
        unit = "frame"
    else:
        frames = latents_to_frames(latents[0])
        caption.append("no VAE: latents seen through their first three principal components")
        unit = "latent frame"
    sheet = folder / "contact_sheet.png"
    files.append(save_contact_sheet(sheet, frames, title=source.name, caption=caption, unit=unit))
    return tuple(files)


def _caption(config: PipelineConfig, scheduler_name: str, report: AttentionReport) -> list[str]:
    generation = config.generation
    guidance = f"guidance {generation.guidance_scale:g}"
    if generation.guidance_scale_2 is not None:
        guidance += f" and {generation.guidance_scale_2:g}"
    kernels = dict.fromkeys(
        f"{row.role}: {row.backend}{f' {row.variant}' if row.variant else ''} ({row.source})"
        for row in report.rows
    )
    return [
        f"{generation.num_frames} frames of {generation.height} x {generation.width}, "
        f"{generation.num_inference_steps} steps of {scheduler_name}, {guidance}, seed {generation.seed}",
        "   ".join(kernels),
    ]
