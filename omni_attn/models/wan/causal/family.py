"""What the command line calls for `pipeline: wan_causal`: describe, build without weights, stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from omni_attn.config import PipelineConfig, WanCausalGenerationConfig
from omni_attn.kv_cache import CUDAGraphMode
from omni_attn.models.artifacts import create_output_folder
from omni_attn.models.family import CachedChoice, generation_as
from omni_attn.models.results import broken_numbers_note
from omni_attn.models.runtime import Progress, RunResult, no_progress, resolve_device, resolve_dtype
from omni_attn.models.seeding import Stream, seeded_generator, seeded_weights_note
from omni_attn.models.wan.causal.model import CausalWanModel
from omni_attn.models.wan.causal.needs import (
    cached_choices,
    check_cache,
    check_memory,
    check_request,
    graphs_note,
    plan_cache,
)
from omni_attn.models.wan.causal.pipeline import CausalWanPipeline
from omni_attn.models.wan.causal.plan import CachePlan
from omni_attn.models.wan.causal.results import ChunkResults, chunk_details
from omni_attn.models.wan.causal.source import (
    CausalSource,
    gates_note,
    load_causal_scheduler,
    load_causal_source,
    settled_request,
)
from omni_attn.models.wan.conditions import PromptEmbeddings
from omni_attn.models.wan.config import TEXT_TOKENS
from omni_attn.models.wan.pixels import load_vae
from omni_attn.models.wan.requests import gather_prompt
from omni_attn.models.wan.seeded import materialise_seeded
from omni_attn.selector import current_scope, use_attention_config

_NAME = "transformer"  # as the checkpoint's folder is called


def build_meta_model(config: PipelineConfig) -> nn.ModuleDict:
    """The transformer on the meta device: its layers and roles, without weights.

    The caller decides what the attention layers do while they are constructed, with `use_attention_config` or
    `collect_attention_requests`.

    Raises:
        ConfigError: neither a preset nor a usable checkpoint folder, or a size does not fit.
    """
    source, generation = _described(config)
    dtype = current_scope().dtype or resolve_dtype(config.dtype, resolve_device(config.device).type)
    plan = plan_cache(generation, source, config.kv_cache, dtype)
    with torch.device("meta"):
        return nn.ModuleDict({_NAME: CausalWanModel(source.config, plan, is_dmd=source.wan.is_dmd)})


def attention_lengths(config: PipelineConfig) -> dict[str, tuple[int, int]]:
    """Role -> (query tokens of a chunk, most keys that it sees).

    Raises:
        ConfigError: the model is unknown, a size does not fit it, or it cannot be sampled as asked.
    """
    source, generation = _described(config)
    plan = plan_cache(generation, source, config.kv_cache, "float32")  # of any dtype, lengths are the same
    frames = source.wan.geometry(generation).latent[0]
    queries = min(plan.chunk_frames, frames) * plan.frame_tokens
    return {
        "self": (queries, plan.held_frames(frames) * plan.frame_tokens),
        "cross": (queries, TEXT_TOKENS),
    }


def number_of_steps(config: PipelineConfig) -> int:
    """Denoising steps of all chunks.

    Raises:
        ConfigError: the model is unknown, or it cannot be sampled as asked.
    """
    source, generation = _described(config)
    frames = source.wan.geometry(generation).latent[0]
    return ceil(frames / generation.chunk_frames) * generation.num_inference_steps


def check_run(config: PipelineConfig, choices: Sequence[CachedChoice], dtype: str) -> None:
    """See ModelFamily.

    Raises:
        ConfigError: the model cannot use what was asked for, or the backends take no such layout, pages or graphs.
    """
    source, generation = _described(config)
    check_request(generation, source)
    check_cache(choices, plan_cache(generation, source, config.kv_cache, dtype), config)


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """A pipeline with its weights on the device, and all that it denoises from.

    Attributes:
        config: what was asked for, with what the checkpoint knows.
        source: the pipeline's description.
        pipeline: the transformer with its sampler.
        model: the transformer by its name, for reports.
        folder: for results; it exists.
        vae: what decodes the latents, None without one.
        prompt: what the video is made from.
        cudagraph_mode: what the backends made of the one asked for.
        notes: what was filled in.
        device, dtype: where and in what it runs.
    """

    config: PipelineConfig
    source: CausalSource
    pipeline: CausalWanPipeline
    model: nn.ModuleDict
    folder: Path
    vae: Any | None
    prompt: PromptEmbeddings
    cudagraph_mode: CUDAGraphMode
    notes: tuple[str, ...]
    device: torch.device
    dtype: str

    def stream(self, *, progress: Progress = no_progress) -> Iterator[torch.Tensor]:
        """Chunks of latents [1, C, f, H, W] float32 from seeded noise, each as soon as it is done."""
        generation = _request(self.config)
        generator = seeded_generator(generation.seed, Stream.NOISE)
        shape = self.source.wan.geometry(generation).latent
        noise = torch.randn((1, self.source.wan.latent_channels, *shape), generator=generator)
        return self.pipeline.stream(
            self.prompt,
            noise.to(self.device),
            num_inference_steps=generation.num_inference_steps,
            guidance_scale=generation.guidance_scale,
            generator=generator,
            progress=progress,
            layout=self.config.kv_cache.layout,
            cudagraph_mode=self.cudagraph_mode,
        )

    def denoise(self, *, progress: Progress = no_progress) -> torch.Tensor:
        """All chunks one behind the other, [1, C, T, H, W] float32."""
        return torch.cat(list(self.stream(progress=progress)), dim=2)


def prepare(config: PipelineConfig, *, progress: Progress = no_progress) -> PreparedRun:
    """Everything before the first denoising step.

    Everything that can be refused is refused before weights are allocated.

    Raises:
        ConfigError: model, sizes, cache, inputs, device, memory or output folder do not fit.
        BackendRejectedError, NoBackendError, BackendImportError: a role's attention cannot run here.
        MissingExtraError: a library of the `pipelines` extra is not installed.
    """
    source = load_causal_source(config.model)
    generation, step_notes = settled_request(_request(config), source)
    config = config.model_copy(update={"generation": generation})
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device.type)
    check_request(generation, source)
    plan = plan_cache(generation, source, config.kv_cache, dtype)
    scheduler = load_causal_scheduler(generation, source)
    lengths = attention_lengths(config)
    with use_attention_config(config.attention, device=device, dtype=dtype, lengths=lengths):
        model = build_meta_model(config)  # selects every role's backend, so that a refusal comes now
        decision = check_cache(cached_choices(model), plan, config)
        check_memory(model, plan, source, generation, device, dtype)
        folder = create_output_folder(config.output)
        vae = load_vae(source.wan)  # early: a broken one must not be found out after the first chunk
        prompt, prompt_notes = gather_prompt(generation, source.wan, device, dtype)
        transformer, weight_notes = _load_weights(
            model, source, plan, generation.seed, device, dtype, progress
        )
    pipeline = CausalWanPipeline(
        transformer, scheduler, generation.timesteps, context_timestep=generation.context_timestep
    )
    notes = (*source.wan.notes, *weight_notes, *step_notes, *prompt_notes, *gates_note(source))
    notes += graphs_note(decision, device)
    return PreparedRun(
        config, source, pipeline, model, folder, vae, prompt, decision.final, notes, device, dtype
    )


def run(config: PipelineConfig, *, progress: Progress = no_progress) -> RunResult:
    """Denoise a video chunk by chunk, and write what there is after each: latents, a sheet and, with a VAE, frames.

    Raises:
        ConfigError, BackendRejectedError, NoBackendError, BackendImportError, MissingExtraError: see prepare.
    """
    ready = prepare(config, progress=progress)
    generation = _request(ready.config)
    results = ChunkResults(
        ready.folder,
        ready.config,
        ready.vae,
        ready.model,
        title=ready.source.wan.name,
        scheduler_name=type(ready.pipeline.scheduler).__name__,
        details=chunk_details(generation),
        notes=ready.notes,
    )
    notes = ready.notes
    for chunk in ready.stream(progress=progress):
        results.add(chunk)
        broken = broken_numbers_note(ready.dtype, chunk)
        notes += tuple(note for note in broken if note not in notes)
    return RunResult(ready.model, ready.folder, results.files, notes, ready.device, ready.dtype)


def _request(config: PipelineConfig) -> WanCausalGenerationConfig:
    return generation_as(config, WanCausalGenerationConfig)


def _described(config: PipelineConfig) -> tuple[CausalSource, WanCausalGenerationConfig]:
    source = load_causal_source(config.model)
    return source, settled_request(_request(config), source)[0]


def _load_weights(
    model: nn.ModuleDict,
    source: CausalSource,
    plan: CachePlan,
    seed: int,
    device: torch.device,
    dtype: str,
    progress: Progress,
) -> tuple[CausalWanModel, tuple[str, ...]]:
    """The transformer with weights from the folder or seeded, also put into `model`; and a note on seeded ones."""
    if source.wan.folder is not None:
        transformer = CausalWanModel.from_pretrained(
            source.wan.folder / _NAME, plan, device=device, dtype=dtype, is_dmd=source.wan.is_dmd
        )
        model[_NAME] = transformer
        return transformer, ()
    transformer = cast(CausalWanModel, model[_NAME])
    materialise_seeded(transformer, seeded_generator(seed, Stream.WEIGHTS, device), dtype, progress)
    return transformer, (seeded_weights_note(seed),)
