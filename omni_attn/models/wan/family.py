"""What the command line calls for `pipeline: wan`: describe, build without weights, run."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from omni_attn.config import PipelineConfig
from omni_attn.models.artifacts import create_output_folder
from omni_attn.models.calibration import calibrate, read_calibrations
from omni_attn.models.runtime import Progress, RunResult, no_progress, resolve_device, resolve_dtype
from omni_attn.models.wan.conditions import Stream, seeded_generator
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.needs import check_fits
from omni_attn.models.wan.pipeline import Wan22Pipeline
from omni_attn.models.wan.pixels import load_vae
from omni_attn.models.wan.requests import check_request, encodes_text, gather_image, gather_prompt
from omni_attn.models.wan.results import write_results
from omni_attn.models.wan.scheduler import load_scheduler
from omni_attn.models.wan.seeded import materialise_seeded
from omni_attn.models.wan.source import WanSource, load_source
from omni_attn.selector import use_attention_config

_NAMES = ("transformer", "transformer_2")  # as a checkpoint's folders are called
_WEIGHT_STREAMS = (Stream.WEIGHTS, Stream.WEIGHTS_2)


def build_meta_model(config: PipelineConfig) -> nn.ModuleDict:
    """All transformers of the pipeline on the meta device: their layers and roles, without weights.

    The caller decides what the attention layers do while they are constructed, with `use_attention_config` or
    `collect_attention_requests`.

    Raises:
        ConfigError: neither a preset nor a usable checkpoint folder; or a role asks for a target sparsity that the
            checkpoint has no calibration for.
    """
    source = load_source(config.model)
    with torch.device("meta"):
        model = nn.ModuleDict(
            {name: WanModel(expert) for name, expert in zip(_NAMES, source.experts, strict=False)}
        )
    _calibrate(model, source)
    return model


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
        folder = create_output_folder(config.output)
        vae = load_vae(source)  # early: a broken one must not be found out after the last step
        prompt, prompt_notes = gather_prompt(generation, source, device, dtype)
        condition, image_notes = gather_image(generation, source, geometry, vae, device)
        experts, weight_notes = _load_weights(model, source, generation.seed, device, dtype, progress)
    pipeline = Wan22Pipeline(
        transformer=experts[0],
        scheduler=scheduler,
        transformer_2=experts[1] if len(experts) == 2 else None,
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
    if not latents.isfinite().all():
        notes += (
            f"the latents hold numbers that are not finite: {dtype} was too narrow, or a kernel is broken",
        )
    files = write_results(folder, latents, config, source, vae, model, type(scheduler).__name__, notes)
    return RunResult(model, folder, files, notes, device, dtype)


def _load_weights(
    model: nn.ModuleDict,
    source: WanSource,
    seed: int,
    device: torch.device,
    dtype: str,
    progress: Progress,
) -> tuple[list[WanModel], tuple[str, ...]]:
    """The transformers with weights from the folder or seeded, also put into `model`; and a note on seeded ones."""
    experts = []
    for name, stream in zip(_NAMES[: len(source.experts)], _WEIGHT_STREAMS, strict=False):
        if source.folder is not None:
            expert = WanModel.from_pretrained(source.folder / name, device=device, dtype=dtype)
        else:
            expert = cast(WanModel, model[name])
            materialise_seeded(expert, seeded_generator(seed, stream, device), dtype, progress)
        model[name] = expert
        experts.append(expert)
    if source.folder is not None:
        _calibrate(model, source)  # these layers are new
        return experts, ()
    return experts, (
        f"weights: seeded (seed {seed}) and untrained, so the frames show colour fields and no subject",
    )


def _calibrate(model: nn.ModuleDict, source: WanSource) -> None:
    names = list(model)
    calibrate(model, read_calibrations(source.folder, names) if source.folder else dict.fromkeys(names))
