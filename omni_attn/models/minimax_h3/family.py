"""What the command line calls for `pipeline: minimax_h3`: describe, build without weights, run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from omni_attn.config import MiniMaxH3GenerationConfig, PipelineConfig
from omni_attn.models.agreement import of_first_rank
from omni_attn.models.calibration import calibrate_pipeline
from omni_attn.models.family import CachedChoice, generation_as
from omni_attn.models.gates import unread_gates_note
from omni_attn.models.minimax_h3.advice import grid_note, sparsity_note
from omni_attn.models.minimax_h3.conditions import Keyframes, Prompt
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.models.minimax_h3.needs import check_fits
from omni_attn.models.minimax_h3.patches import rows_to_audio
from omni_attn.models.minimax_h3.pipeline import MiniMaxH3Pipeline
from omni_attn.models.minimax_h3.pixels import load_vaes
from omni_attn.models.minimax_h3.requests import (
    check_request,
    encodes_text,
    expected_text_rows,
    gather_keyframes,
    gather_prompt,
    open_pictures,
)
from omni_attn.models.minimax_h3.results import write_results
from omni_attn.models.minimax_h3.schedule import build_schedulers
from omni_attn.models.minimax_h3.seeded import materialise_seeded
from omni_attn.models.minimax_h3.source import TRANSFORMER, MiniMaxH3Source, load_source
from omni_attn.models.ranks import among_ranks, results_folder
from omni_attn.models.results import broken_numbers_note
from omni_attn.models.runtime import Progress, RunResult, no_progress, resolve_device, resolve_dtype
from omni_attn.models.seeding import Stream, seeded_generator, seeded_weights_note
from omni_attn.selector import use_attention_config


def build_meta_model(config: PipelineConfig) -> nn.ModuleDict:
    """The transformer on the meta device: its layers and roles, without weights. See ModelFamily.

    Raises:
        ConfigError: neither a preset nor a usable checkpoint folder; or a role asks for a target sparsity that the
            checkpoint has no calibration for.
    """
    return _build_meta_model(load_source(config.model, config.adapter))


def attention_lengths(config: PipelineConfig) -> dict[str, tuple[int, int]]:
    """Role -> (query tokens, key tokens) of the requested video; a text that is yet to be encoded counts by a guess.

    Raises:
        ConfigError: the model is unknown, or a size does not fit it.
    """
    source, generation = load_source(config.model, config.adapter), _request(config)
    text_rows = expected_text_rows(generation)
    rows = source.geometry(generation).num_rows(text_rows)
    return source.transformer.attention_lengths(rows, text_rows)


def number_of_steps(config: PipelineConfig) -> int:
    """Forwards of the run: one less than points of the schedule.

    Raises:
        ConfigError: the model is unknown, or distilled to other points.
    """
    return load_source(config.model, config.adapter).settle(_request(config)).num_inference_steps - 1


def check_run(config: PipelineConfig, choices: Sequence[CachedChoice], dtype: str) -> None:
    """See ModelFamily.

    Raises:
        ConfigError: the model cannot use what was asked for.
    """
    source = load_source(config.model, config.adapter)
    check_request(source.settle(_request(config)), source)


@dataclass(frozen=True, eq=False)
class PreparedRun:
    """A pipeline with its weights on the device, and all that it denoises from.

    Attributes:
        config: what was asked for, with the points of a distilled checkpoint's schedule where it left them out.
        source: the pipeline's description.
        pipeline: the transformer with its samplers.
        model: the transformer by its name, for reports.
        folder: for results; it exists. None where another rank writes them.
        vaes: what decodes the latents of video and sound, None each without one.
        prompt, keyframes: what video and sound are made from.
        notes: what was filled in.
        device, dtype: where and in what it runs.
    """

    config: PipelineConfig
    source: MiniMaxH3Source
    pipeline: MiniMaxH3Pipeline
    model: nn.ModuleDict
    folder: Path | None
    vaes: tuple[Any | None, Any | None]
    prompt: Prompt
    keyframes: Keyframes | None
    notes: tuple[str, ...]
    device: torch.device
    dtype: str

    def denoise(self, *, progress: Progress = no_progress) -> tuple[Tensor, Tensor]:
        """Latents from seeded noise, float32: of the video [1, C, T, H, W], and of the sound [1, 2, C, A].

        One generator draws, as in diffusers, the trace of noise on keyframes, then video, then sound row by row.
        """
        generation, transformer = _request(self.config), self.source.transformer
        geometry = self.source.geometry(generation)
        generator = seeded_generator(generation.seed, Stream.NOISE)
        keyframes = None if self.keyframes is None else self.keyframes.noised(generator)
        noise = torch.randn((1, transformer.in_channels, *geometry.latent), generator=generator)
        rows = torch.randn((1, 2 * geometry.audio, transformer.audio_in_channels), generator=generator)
        return self.pipeline(
            self.prompt,
            noise.to(self.device),
            rows_to_audio(rows).to(self.device),
            keyframes=keyframes,
            num_inference_steps=generation.num_inference_steps,
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
    source, asked = load_source(config.model, config.adapter), _request(config)
    generation = source.settle(asked)
    config = config.model_copy(update={"generation": generation})
    geometry, text_rows = source.geometry(generation), expected_text_rows(generation)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device.type)
    check_request(generation, source)
    build_schedulers(source.plan)  # early: a diffusers without them must not be found out after the weights
    lengths = source.transformer.attention_lengths(geometry.num_rows(text_rows), text_rows)
    with use_attention_config(config.attention, device=device, dtype=dtype, lengths=lengths):
        model = _build_meta_model(source)  # selects every role's backend, so that a refusal comes now
        reads, ranks = encodes_text(generation), config.parallel
        check_fits(model, source, geometry, text_rows, device, dtype, encodes_text=reads, parallel=ranks)
        folder = results_folder(config)
        vaes = load_vaes(source)  # early: a broken one must not be found out after the last step
        pictures = open_pictures(generation)
        prompt, prompt_notes = gather_prompt(generation, source, pictures, device, dtype)
        keyframes, keyframe_notes = gather_keyframes(generation, source, geometry, pictures, vaes[0], device)
        prompt, keyframes = of_first_rank(prompt, device), of_first_rank(keyframes, device)
        transformer, weight_notes = _load_weights(model, source, generation.seed, device, dtype, progress)
    notes = (
        *source.notes,
        *weight_notes,
        *grid_note(source, asked),
        *source.size_notes(generation),
        *prompt_notes,
        *keyframe_notes,
        *unread_gates_note(model),
        *sparsity_note(source, model),
    )
    pipeline = MiniMaxH3Pipeline.for_plan(transformer, source.plan)
    return PreparedRun(config, source, pipeline, model, folder, vaes, prompt, keyframes, notes, device, dtype)


def run(config: PipelineConfig, *, progress: Progress = no_progress) -> RunResult:
    """Denoise a video with its sound and write both: latents, a contact sheet and, with VAEs, frames and a sound file.

    Raises:
        ConfigError, BackendRejectedError, NoBackendError, BackendImportError, MissingExtraError: see prepare.
    """
    ready = prepare(config, progress=progress)
    latents = ready.denoise(progress=progress)
    notes = ready.notes + broken_numbers_note(ready.dtype, *latents)
    files: tuple[Path, ...] = ()
    if ready.folder is not None:  # of several ranks one writes
        files = write_results(
            ready.folder, latents, ready.config, ready.source, ready.vaes, ready.model, notes
        )
    return RunResult(ready.model, ready.folder, files, notes, ready.device, ready.dtype)


def _request(config: PipelineConfig) -> MiniMaxH3GenerationConfig:
    return generation_as(config, MiniMaxH3GenerationConfig)


def _build_meta_model(source: MiniMaxH3Source) -> nn.ModuleDict:
    with torch.device("meta"):
        model = nn.ModuleDict({TRANSFORMER: MiniMaxH3Model(source.transformer)})
    calibrate_pipeline(model, source.folder)
    return model


def _load_weights(
    model: nn.ModuleDict,
    source: MiniMaxH3Source,
    seed: int,
    device: torch.device,
    dtype: str,
    progress: Progress,
) -> tuple[MiniMaxH3Model, tuple[str, ...]]:
    """The transformer with weights from the folder or seeded, also put into `model`; and a note on seeded ones."""
    if source.folder is None:
        seeded = cast(MiniMaxH3Model, model[TRANSFORMER])
        materialise_seeded(seeded, seeded_generator(seed, Stream.WEIGHTS, device), dtype, progress)
        return seeded, (seeded_weights_note(seed),)
    folder = source.folder / TRANSFORMER
    loaded = MiniMaxH3Model.from_pretrained(folder, device=device, dtype=dtype, adapter=source.adapter)
    model[TRANSFORMER] = loaded
    calibrate_pipeline(model, source.folder)  # these layers are new
    return loaded, ()
