"""Where a causal Wan pipeline comes from, and the chunks and steps that it was made for. Reads no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from omni_attn.config import WanCausalGenerationConfig
from omni_attn.errors import ConfigError
from omni_attn.models.folders import find_folder, read_part
from omni_attn.models.wan.causal.config import check_causal, read_causal_config, trained_chunks
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.dmd import DMD_TIMESTEPS, build_dmd_scheduler
from omni_attn.models.wan.presets import DMD_FLOW_SHIFT, WAN_PRESETS, WanPreset
from omni_attn.models.wan.scheduler import load_scheduler
from omni_attn.models.wan.source import CAUSAL_DMD_CLASS, DMD_CLASS, WanSource, load_folder, preset_source

CAUSAL_TIMESTEPS = (1000.0, 850.0, 700.0, 550.0, 350.0, 275.0, 200.0, 125.0)
CAUSAL_FLOW_SHIFT = 12.0  # of the schedule that WanCausalDMDPipeline checkpoints were distilled on


def _causal(preset: WanPreset, name: str) -> WanPreset:
    return dataclasses.replace(preset, name=name, flow_shift=CAUSAL_FLOW_SHIFT, is_dmd=True)


_DISTILLED = (
    _causal(WAN_PRESETS["wan2.1-t2v-1.3b"], "causal-wan2.1-t2v-1.3b"),
    _causal(WAN_PRESETS["wan-tiny"], "causal-wan-tiny"),
)
_FROM_TEXT = [
    preset
    for preset in WAN_PRESETS.values()
    if preset.num_experts == 1 and preset.transformer.in_channels == preset.transformer.out_channels
]
CAUSAL_PRESETS: Mapping[str, WanPreset] = MappingProxyType(
    {preset.name: preset for preset in (*_DISTILLED, *_FROM_TEXT)}
)
"""Distilled causal models, and text-to-video ones that were made for whole videos."""


@dataclass(frozen=True, kw_only=True)
class CausalSource:
    """A causal pipeline before anything is built.

    Attributes:
        wan: its description.
        is_causal: it was trained chunk by chunk.
        timesteps: that it was distilled to, None = it was not.
        chunk_frames, window_frames, sink_frames: that it was trained with, see CachePlan; None in chunk_frames = not
            told.
    """

    wan: WanSource
    is_causal: bool
    timesteps: tuple[float, ...] | None
    chunk_frames: int | None = None
    window_frames: int | None = None
    sink_frames: int = 0

    @property
    def config(self) -> WanConfig:
        """Of the one transformer."""
        return self.wan.transformer


def load_causal_source(model: str) -> CausalSource:
    """The description of a preset, or of a checkpoint folder.

    Raises:
        ConfigError: neither; a folder whose files are missing, broken or of another kind of model; or a model that
            cannot make its video chunk by chunk.
    """
    if model in CAUSAL_PRESETS:
        preset = CAUSAL_PRESETS[model]
        is_causal = preset in _DISTILLED
        return CausalSource(
            wan=preset_source(preset), is_causal=is_causal, timesteps=_timesteps(preset.is_dmd, is_causal)
        )
    if model in WAN_PRESETS:
        raise ConfigError(
            f"model: {model} reads pictures or has two transformers, and a causal pipeline makes video from text with "
            f"one. Choose {', '.join(CAUSAL_PRESETS)}, or pipeline: wan."
        )
    folder = find_folder(model, CAUSAL_PRESETS)
    source = load_folder(
        folder,
        classes=(CAUSAL_DMD_CLASS, DMD_CLASS, "WanPipeline"),
        distilled={CAUSAL_DMD_CLASS: CAUSAL_FLOW_SHIFT, DMD_CLASS: DMD_FLOW_SHIFT},
        read=read_causal_config,
    )
    if len(source.experts) == 2:
        raise ConfigError(
            f"model: {folder} has two transformers, and each would keep a cache of its own, which this pipeline does "
            "not. Choose a checkpoint with one."
        )
    check_causal(source.transformer, str(folder))
    is_causal = read_part(folder / "model_index.json").get("_class_name") == CAUSAL_DMD_CLASS
    path = folder / "transformer" / "config.json"
    return CausalSource(
        wan=source,
        is_causal=is_causal,
        timesteps=_timesteps(source.is_dmd, is_causal),
        **trained_chunks(read_part(path), source=str(path)),
    )


def settled_request(
    generation: WanCausalGenerationConfig, source: CausalSource
) -> tuple[WanCausalGenerationConfig, tuple[str, ...]]:
    """The request with what the checkpoint knows and the file left open, and notes on that.

    Raises:
        ConfigError: it asks for steps or guidance that a distilled model does not have.
    """
    stated, settled, notes = generation.model_fields_set, dict[str, Any](), list[str]()
    if source.chunk_frames is not None and not stated & {"chunk_frames", "window_frames", "sink_frames"}:
        settled = {name: getattr(source, name) for name in ("chunk_frames", "window_frames", "sink_frames")}
    timesteps = generation.timesteps or source.timesteps
    if timesteps is not None:
        steps = len(timesteps)
        problems = []
        if "num_inference_steps" in stated and generation.num_inference_steps != steps:
            problems.append(
                f"generation.num_inference_steps: {generation.num_inference_steps}, and {source.wan.name} is distilled "
                f"to {steps} steps, at timesteps {_listed(timesteps)}. Leave it out, or give generation.timesteps."
            )
        if source.timesteps is not None and generation.guidance_scale > 1:
            problems.append(
                f"generation.guidance_scale: {generation.guidance_scale:g}, and guidance is distilled into "
                f"{source.wan.name}, which would apply it twice. Leave it out, or set it to 1."
            )
        if problems:
            raise ConfigError(*problems)
        if generation.timesteps is None:
            notes.append(
                f"steps: timesteps {_listed(timesteps)}, as {source.wan.name} was distilled for them"
            )
        settled |= {"timesteps": timesteps, "num_inference_steps": steps}
    if not source.is_causal:
        notes.append(
            f"chunks: {source.wan.name} was made for whole videos, and sees only what came before here"
        )
    return generation.model_copy(update=settled), tuple(notes)


def gates_note(source: CausalSource) -> tuple[str, ...]:
    """What is left out of a transformer with gates."""
    if not source.config.gate_compress:
        return ()
    return (
        f"gates: {source.config.num_layers} layers leave out to_gate_compress, which attention over pages does not "
        "read, so the result is not what the model was made for",
    )


def _timesteps(is_dmd: bool, is_causal: bool) -> tuple[float, ...] | None:
    if not is_dmd:
        return None
    return CAUSAL_TIMESTEPS if is_causal else tuple(map(float, DMD_TIMESTEPS))


def _listed(timesteps: tuple[float, ...]) -> str:
    return ", ".join(f"{timestep:g}" for timestep in timesteps)


def load_causal_scheduler(generation: WanCausalGenerationConfig, source: CausalSource) -> Any:
    """The checkpoint's scheduler; for stated timesteps the one that distilled models run on."""
    if generation.timesteps is None or source.wan.is_dmd:
        return load_scheduler(source.wan)
    return build_dmd_scheduler(source.wan.flow_shift or CAUSAL_FLOW_SHIFT)
