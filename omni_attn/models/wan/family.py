"""What the command line calls for `pipeline: wan`: describe, build without weights, run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from omni_attn.config import PipelineConfig, WanGenerationConfig
from omni_attn.models.agreement import of_first_rank
from omni_attn.models.calibration import calibrate_pipeline
from omni_attn.models.family import CachedChoice, generation_as
from omni_attn.models.gates import unread_gates_note
from omni_attn.models.ranks import among_ranks, results_folder
from omni_attn.models.results import broken_numbers_note
from omni_attn.models.runtime import Progress, RunResult, no_progress, resolve_device, resolve_dtype
from omni_attn.models.seeding import Stream, seeded_generator, seeded_weights_note
from omni_attn.models.wan.conditions import ImageCondition, PromptEmbeddings
from omni_attn.models.wan.dmd import dmd_generation
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
            {
                name: WanModel(expert, is_dmd=source.is_dmd)
                for name, expert in zip(_NAMES, source.experts, strict=False)
            }
        )
    calibrate_pipeline(model, source.folder)
    return model


def attention_lengths(config: PipelineConfig) -> dict[str, tuple[int, int]]:
    """Role -> (query tokens, key tokens) of the requested video.

    Raises:
        ConfigError: the model is unknown, a size does not fit it, or it cannot be sampled as asked.
    """
    source = load_source(config.model)
    generation, _ = dmd_generation(_request(config), source)
    return source.attention_lengths(generation, config.parallel.size)


def number_of_steps(config: PipelineConfig) -> int:
    """Denoising steps of the run; those a distilled checkpoint is made for, where it is one.

    Raises:
        ConfigError: the model is unknown, or it cannot be sampled as asked.
    """
    generation, _ = dmd_generation(_request(config), load_source(config.model))
    return generation.num_inference_steps


def check_run(config: PipelineConfig, choices: Sequence[CachedChoice], dtype: str) -> None:
    """See ModelFamily.

    Raises:
        ConfigError: the model cannot use what was asked for.
    """
    source = load_source(config.model)
    check_request(dmd_generation(_request(config), source)[0], source)


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """A pipeline with its weights on the device, and all that it denoises from.

    Attributes:
        config: what was asked for, with the steps of a distilled checkpoint where it left them out.
        source: the pipeline's description.
        pipeline: the transformers with their sampler.
        model: every transformer by its name, for reports.
        folder: for results; it exists. None where another rank writes them.
        vae: what decodes the latents, None without one.
        prompt, condition: what the video is made from.
        notes: what was filled in.
        device, dtype: where and in what it runs.
    """

    config: PipelineConfig
    source: WanSource
    pipeline: Wan22Pipeline
    model: nn.ModuleDict
    folder: Path | None
    vae: Any | None
    prompt: PromptEmbeddings
    condition: ImageCondition | None
    notes: tuple[str, ...]
    device: torch.device
    dtype: str

    def denoise(self, *, progress: Progress = no_progress) -> torch.Tensor:
        """Latents [1, C, T, H, W] float32 from seeded noise."""
        generation = _request(self.config)
        generator = seeded_generator(generation.seed, Stream.NOISE)
        shape = self.source.geometry(generation).latent
        noise = torch.randn((1, self.source.latent_channels, *shape), generator=generator)
        return self.pipeline(
            self.prompt,
            noise.to(self.device),
            num_inference_steps=generation.num_inference_steps,
            guidance_scale=generation.guidance_scale,
            guidance_scale_2=generation.guidance_scale_2,
            condition=self.condition,
            generator=generator,
            progress=progress,
        )


def prepare(config: PipelineConfig, *, progress: Progress = no_progress) -> PreparedRun:
    """Everything before the first denoising step.

    Everything that can be refused is refused before weights are allocated.

    Raises:
        ConfigError: model, sizes, inputs, device, memory or output folder do not fit.
        BackendRejectedError, NoBackendError, BackendImportError: a role's attention cannot run here.
        MissingExtraError: a library of the `pipelines` extra is not installed.
    """
    config = among_ranks(config)
    source = load_source(config.model)
    generation, step_notes = dmd_generation(_request(config), source)
    config = config.model_copy(update={"generation": generation})
    geometry = source.geometry(generation)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device.type)
    check_request(generation, source)
    scheduler = load_scheduler(source)
    lengths = source.attention_lengths(generation, config.parallel.size)
    with use_attention_config(config.attention, device=device, dtype=dtype, lengths=lengths):
        model = build_meta_model(config)  # selects every role's backend, so that a refusal comes now
        reads_text = encodes_text(generation, source)
        check_fits(model, source, geometry, device, dtype, encodes_text=reads_text, parallel=config.parallel)
        folder = results_folder(config)
        vae = load_vae(source)  # early: a broken one must not be found out after the last step
        prompt, prompt_notes = gather_prompt(generation, source, device, dtype)
        condition, image_notes = gather_image(generation, source, geometry, vae, device)
        prompt, condition = of_first_rank(prompt, device), of_first_rank(condition, device)
        experts, weight_notes = _load_weights(model, source, generation.seed, device, dtype, progress)
    pipeline = Wan22Pipeline(
        transformer=experts[0],
        scheduler=scheduler,
        transformer_2=experts[1] if len(experts) == 2 else None,
        boundary_ratio=source.boundary_ratio,
        expand_timesteps=source.expand_timesteps,
    )
    notes = (
        *source.notes,
        *weight_notes,
        *step_notes,
        *prompt_notes,
        *image_notes,
        *unread_gates_note(model),
    )
    return PreparedRun(config, source, pipeline, model, folder, vae, prompt, condition, notes, device, dtype)


def run(config: PipelineConfig, *, progress: Progress = no_progress) -> RunResult:
    """Denoise a video and write it: latents, a contact sheet and, with a VAE, its frames. Of several ranks one writes.

    Raises:
        ConfigError, BackendRejectedError, NoBackendError, BackendImportError, MissingExtraError: see prepare.
    """
    ready = prepare(config, progress=progress)
    latents = ready.denoise(progress=progress)
    notes = ready.notes + broken_numbers_note(ready.dtype, latents)
    files: tuple[Path, ...] = ()
    if ready.folder is not None:
        scheduler_name = type(ready.pipeline.scheduler).__name__
        files = write_results(
            ready.folder, latents, ready.config, ready.source, ready.vae, ready.model, scheduler_name, notes
        )
    return RunResult(ready.model, ready.folder, files, notes, ready.device, ready.dtype)


def _request(config: PipelineConfig) -> WanGenerationConfig:
    return generation_as(config, WanGenerationConfig)


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
            expert = WanModel.from_pretrained(
                source.folder / name, device=device, dtype=dtype, is_dmd=source.is_dmd
            )
        else:
            expert = cast(WanModel, model[name])
            materialise_seeded(expert, seeded_generator(seed, stream, device), dtype, progress)
        model[name] = expert
        experts.append(expert)
    if source.folder is not None:
        calibrate_pipeline(model, source.folder)  # these layers are new
        return experts, ()
    return experts, (seeded_weights_note(seed),)
