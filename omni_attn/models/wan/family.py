"""What the command line calls for `pipeline: wan`: describe, build without weights, run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omni_attn.config import PipelineConfig
from omni_attn.models import artifacts
from omni_attn.models.runtime import Progress, RunResult, no_progress, resolve_device, resolve_dtype
from omni_attn.models.wan.conditions import Stream, seeded_generator
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.needs import check_fits
from omni_attn.models.wan.pipeline import Wan22Pipeline
from omni_attn.models.wan.pixels import decode_latents, load_vae
from omni_attn.models.wan.requests import check_request, encodes_text, gather_image, gather_prompt
from omni_attn.models.wan.scheduler import load_scheduler
from omni_attn.models.wan.seeded import materialise_seeded
from omni_attn.models.wan.source import VideoGeometry, WanSource, load_source
from omni_attn.report import attention_report
from omni_attn.selector import use_attention_config

_NAMES = ("transformer", "transformer_2")  # as a checkpoint's folders are called
_WEIGHT_STREAMS = (Stream.WEIGHTS, Stream.WEIGHTS_2)


def build_meta_model(config: PipelineConfig) -> nn.ModuleDict:
    """All transformers of the pipeline on the meta device: their layers and roles, without weights.

    The caller decides what the attention layers do while they are constructed, with `use_attention_config` or
    `collect_attention_requests`.

    Raises:
        ConfigError: neither a preset nor a usable checkpoint folder.
    """
    source = load_source(config.model)
    with torch.device("meta"):
        return nn.ModuleDict({name: WanModel(expert) for name, expert in zip(_NAMES, source.experts, strict=False)})


def attention_lengths(config: PipelineConfig) -> dict[str, tuple[int, int]]:
    """Role -> (query tokens, key tokens) of the requested video.

    Raises:
        ConfigError: the model is unknown, or a size does not fit it.
    """
    return load_source(config.model).attention_lengths(config.generation)


def run(config: PipelineConfig, *, progress: Progress = no_progress) -> RunResult:
    """Denoise a video and write it: latents, a contact sheet and, with a VAE, its frames.

    Everything that can be refused is refused before weights are allocated.

    Raises:
        ConfigError: model, sizes, inputs, device, memory or output folder do not fit.
        BackendRejectedError, NoBackendError, BackendImportError: a role's attention cannot run here.
        MissingExtraError: a library of the `pipelines` extra is not installed.
    """
    source, generation = load_source(config.model), config.generation
    geometry = source.geometry(generation)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device.type)
    check_request(generation, source)
    scheduler = load_scheduler(source)
    lengths = source.attention_lengths(generation)
    with use_attention_config(config.attention, device=device, dtype=dtype, lengths=lengths):
        model = build_meta_model(config)  # selects every role's backend, so that a refusal comes now
        check_fits(model, source, geometry, device, dtype, encodes_text=encodes_text(generation, source))
        folder = artifacts.create_output_folder(config.output)
        prompt, prompt_notes = gather_prompt(generation, source, device, dtype)
        condition, image_notes = gather_image(generation, source, geometry, device)
        weight_notes = _load_weights(model, source, generation.seed, device, dtype)
    pipeline = Wan22Pipeline(
        transformer=model["transformer"],
        scheduler=scheduler,
        transformer_2=model["transformer_2"] if "transformer_2" in model else None,
        boundary_ratio=source.boundary_ratio,
        expand_timesteps=source.expand_timesteps,
    )
    generator = seeded_generator(generation.seed, Stream.NOISE)
    noise = torch.randn((1, source.latent_channels, *geometry.latent), generator=generator)
    latents = pipeline(
        prompt,
        noise.to(device),
        num_inference_steps=generation.num_inference_steps,
        guidance_scale=generation.guidance_scale,
        guidance_scale_2=generation.guidance_scale_2,
        condition=condition,
        generator=generator,
        progress=progress,
    )
    notes = (*source.notes, *weight_notes, *prompt_notes, *image_notes)
    files = _write(folder, latents, config, source, geometry, model, scheduler, notes)
    return RunResult(model, folder, files, notes, device, dtype)


def _load_weights(
    model: nn.ModuleDict, source: WanSource, seed: int, device: torch.device, dtype: str
) -> tuple[str, ...]:
    """Give every transformer its weights, from the folder or seeded, and say which if they are not a checkpoint's."""
    for name, stream in zip(_NAMES[: len(source.experts)], _WEIGHT_STREAMS, strict=False):
        if source.folder is not None:
            model[name] = WanModel.from_pretrained(source.folder / name, device=device, dtype=dtype)
        else:
            transformer = model[name]
            assert isinstance(transformer, WanModel)
            materialise_seeded(transformer, seeded_generator(seed, stream, device), dtype)
    if source.folder is not None:
        return ()
    return (f"weights: seeded (seed {seed}) and untrained, so the frames show colour fields and no subject",)


def _write(
    folder: Path,
    latents: torch.Tensor,
    config: PipelineConfig,
    source: WanSource,
    geometry: VideoGeometry,
    model: nn.Module,
    scheduler: Any,
    notes: tuple[str, ...],
) -> tuple[Path, ...]:
    """Latents first, since they are what cannot be made again cheaply; then pictures."""
    report = attention_report(model)
    files = [
        artifacts.save_latents(
            folder / "latents.safetensors",
            latents,
            {
                "model": config.model,
                "seed": str(config.generation.seed),
                "steps": str(config.generation.num_inference_steps),
                "scheduler": type(scheduler).__name__,
                "attention": json.dumps(report.to_dict()),
            },
        )
    ]
    if "vae" in source.parts and source.folder is not None:
        video = decode_latents(load_vae(source.folder, latents.device), latents)
        frames, unit = artifacts.video_to_frames(video), "frame"
        files += artifacts.save_frames(folder, frames)
    else:
        frames, unit = artifacts.latents_to_frames(latents[0]), "latent frame"
    files.append(
        artifacts.save_contact_sheet(
            folder / "contact_sheet.png",
            frames,
            title=source.name,
            caption=_caption(config, geometry, scheduler, unit, report.rows, notes),
            unit=unit,
        )
    )
    return tuple(files)
