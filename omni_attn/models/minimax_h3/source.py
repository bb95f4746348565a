"""Where a MiniMax-H3 pipeline comes from: a preset's name or a diffusers-format folder, described in one record.

Reads only small JSON files and the names of weights: no weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omni_attn.config import MiniMaxH3GenerationConfig
from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import stored_header
from omni_attn.models.folders import find_folder, find_index, read_part
from omni_attn.models.gates import has_gates
from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.contract import InferenceContract, contract_of_student, read_contract
from omni_attn.models.minimax_h3.fasth3 import open_adapter
from omni_attn.models.minimax_h3.loading import convert_config, weights_stem
from omni_attn.models.minimax_h3.presets import MINIMAX_H3_PRESETS
from omni_attn.models.minimax_h3.quantised import check_supported
from omni_attn.models.minimax_h3.schedule import MINIMAX_H3_PLAN, SamplingPlan
from omni_attn.models.minimax_h3.sizes import LatentSize, audio_latents, latent_size, untrained_sizes

TRANSFORMER = "transformer"  # as a checkpoint's folder is called: what makes video from text and keyframes
PIPELINE_CLASSES = ("MiniMaxH3ModularPipeline", "MiniMaxH3Pipeline")
_INDICES = ("modular_model_index.json", "model_index.json")
_SCHEDULER_CLASS = "MiniMaxH3Scheduler"
_OPTIONAL_PARTS = ("text_encoder", "tokenizer", "processor", "vae", "audio_vae")


@dataclass(frozen=True)
class JointGeometry:
    """Sizes of one request: `latent` is (frames, height, width) of the video's latents, `grid` the same in rows of the
    sequence, `audio` the latents of each of the sound's two channels.
    """

    num_frames: int
    height: int
    width: int
    latent: LatentSize
    grid: tuple[int, int, int]
    audio: int
    keyframes: int

    def num_rows(self, text_rows: int) -> int:
        """Rows of the packed sequence with a prompt of so many."""
        frames, height, width = self.grid
        return text_rows + (self.keyframes + frames) * height * width + 2 * self.audio


@dataclass(frozen=True, kw_only=True)
class MiniMaxH3Source:
    """A MiniMax-H3 pipeline before anything is built.

    Attributes:
        name: the preset's, or the folder.
        transformer: its parameters.
        plan: how it is sampled.
        folder: None for a preset.
        parts: what a folder has beside transformer and schedulers.
        contract: what a distilled checkpoint was trained for; None for others.
        adapter: becomes part of the weights as they are loaded.
        notes: what was filled in.
    """

    name: str
    transformer: MiniMaxH3Config
    plan: SamplingPlan
    folder: Path | None = None
    parts: frozenset[str] = frozenset()
    contract: InferenceContract | None = None
    adapter: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_small(self) -> bool:
        """True for the presets that are made to be run anywhere."""
        return self.folder is None and self.name.endswith("-tiny")

    def settle(self, generation: MiniMaxH3GenerationConfig) -> MiniMaxH3GenerationConfig:
        """The request with the points of the schedule that the checkpoint was distilled for, where it left them out.

        Raises:
            ConfigError: it asks for others.
        """
        is_stated = "num_inference_steps" in generation.model_fields_set
        try:
            points = self.plan.points(generation.num_inference_steps if is_stated else None)
        except ConfigError as error:
            raise ConfigError(
                *(f"generation: {self.name}: {problem}" for problem in error.problems)
            ) from None
        return generation.model_copy(update={"num_inference_steps": points})

    def geometry(self, generation: MiniMaxH3GenerationConfig) -> JointGeometry:
        """Latents and grid of a request.

        Raises:
            ConfigError: a size that the VAE cannot code.
        """
        sizes = (generation.num_frames, generation.height, generation.width)
        latent = latent_size(*sizes)
        keyframes = sum(image is not None for image in (generation.image, generation.last_image))
        grid = self.transformer.token_grid(*latent)
        return JointGeometry(*sizes, latent, grid, audio_latents(generation.num_frames), keyframes)

    def size_notes(self, generation: MiniMaxH3GenerationConfig) -> tuple[str, ...]:
        """What lies outside of what the released model was made for; nothing about the small presets."""
        if self.is_small:
            return ()
        sizes = (generation.num_frames, generation.height, generation.width)
        return tuple(f"size: {note}" for note in untrained_sizes(*sizes))


def load_source(model: str, adapter: str | None = None) -> MiniMaxH3Source:
    """The description of a preset, or of a checkpoint folder, with an adapter if one is named.

    Raises:
        ConfigError: neither; a folder whose files are missing, broken or of another kind of model; or an adapter that
            cannot be read, or that came with a preset.
    """
    source = _load_source(model)
    return source if adapter is None else _with_adapter(source, adapter)


def _with_adapter(source: MiniMaxH3Source, path: str) -> MiniMaxH3Source:
    if source.folder is None:
        raise ConfigError(
            f"adapter: {path!r} changes the weights that a student was trained from, and {source.name} is a preset "
            "with seeded ones. Name the folder of the base checkpoint in `model`."
        )
    adapter = open_adapter(path)
    source = replace(
        source,
        adapter=adapter.source,
        transformer=replace(
            source.transformer, gate_compress=source.transformer.gate_compress or adapter.has_gates
        ),
        notes=(*source.notes, f"adapter: {adapter.source} fused into the weights"),
    )
    contract = contract_of_student(adapter.student)
    if contract is None:  # it keeps the base's schedule
        return source
    contract.check_shifts(source.plan.video_shift, source.plan.audio_shift, source=str(adapter.source))
    return replace(source, contract=contract, plan=replace(source.plan, grid=contract.base_grid))


def _load_source(model: str) -> MiniMaxH3Source:
    if model in MINIMAX_H3_PRESETS:
        preset = MINIMAX_H3_PRESETS[model]
        return MiniMaxH3Source(name=preset.name, transformer=preset.transformer, plan=preset.plan)
    return _load_folder(find_folder(model, MINIMAX_H3_PRESETS))


def _load_folder(folder: Path) -> MiniMaxH3Source:
    index = find_index(folder, "MiniMaxH3Model", _INDICES)
    class_name = read_part(index).get("_class_name")
    if class_name not in PIPELINE_CLASSES:
        raise ConfigError(
            f"{index}: _class_name is {class_name!r}; this pipeline runs {', '.join(PIPELINE_CLASSES)}. Choose such a "
            "checkpoint."
        )
    if not (folder / TRANSFORMER).is_dir() and (folder / "transformer_ref").is_dir():
        raise ConfigError(
            f"model: {folder} holds transformer_ref alone, which makes video from references, and a pipeline file "
            "states none. Add transformer/, or call MiniMaxH3Pipeline.denoise_rows with a sequence of pack_ref2va."
        )
    transformer = _read_transformer(folder / TRANSFORMER)
    contract = read_contract(folder)
    video_shift = _read_shift(folder / "scheduler")
    has_audio = (folder / "audio_scheduler").is_dir()
    audio_shift = _read_shift(folder / "audio_scheduler") if has_audio else MINIMAX_H3_PLAN.audio_shift
    if contract is not None:
        contract.check_shifts(video_shift, audio_shift, source=str(folder))
    return MiniMaxH3Source(
        name=str(folder),
        transformer=transformer,
        plan=SamplingPlan(
            video_shift=video_shift,
            audio_shift=audio_shift,
            grid=None if contract is None else contract.base_grid,
        ),
        folder=folder,
        parts=frozenset(part for part in _OPTIONAL_PARTS if (folder / part).is_dir()),
        contract=contract,
        notes=()
        if has_audio
        else (f"{folder} has no audio_scheduler/: sound is sampled with shift {audio_shift:g}",),
    )


def _read_transformer(folder: Path) -> MiniMaxH3Config:
    """A transformer's parameters: those in config.json, and whether its weights have gates."""
    values = read_part(folder / "config.json")
    header = stored_header(folder, weights_stem(folder))
    check_supported(folder, values, header)
    source = str(folder / "config.json")
    config = MiniMaxH3Config.from_dict(convert_config(values, source=source), source=source)
    return config if "gate_compress" in values else replace(config, gate_compress=has_gates(header))


def _read_shift(folder: Path) -> float:
    path = folder / "scheduler_config.json"
    values: dict[str, Any] = read_part(path)
    class_name = values.get("_class_name", _SCHEDULER_CLASS)
    if class_name != _SCHEDULER_CLASS:
        raise ConfigError(
            f"{path}: _class_name is {class_name!r}, and MiniMax-H3's velocities point to the data, which only "
            f"{_SCHEDULER_CLASS} reads so. Save the pipeline with that one."
        )
    shift = values.get("shift", MINIMAX_H3_PLAN.video_shift)
    if isinstance(shift, bool) or not isinstance(shift, (int, float)) or not shift > 0:
        raise ConfigError(f"{path}: shift is {shift!r}, and must be a positive number. Correct it.")
    return float(shift)
