"""The pipeline YAML: which model, which attention, what to generate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator

from omni_attn.config.attention import AttentionConfig
from omni_attn.config.base import ConfigModel, Count, NonNegative, PathText, PositiveInt, Text
from omni_attn.config.names import nearest
from omni_attn.config.spec import NameShorthand
from omni_attn.config.tuned import TunedFor

PIPELINES = ("wan",)
"""Names that `pipeline` may have."""


def _side(value: int) -> int:
    if value % 16:
        below = value // 16 * 16
        near = f"{below} or {below + 16}" if below else "16"
        raise ValueError(f"must be a positive multiple of 16, found {value}. Nearest: {near}")
    return value


def _frames(value: int) -> int:
    if value % 4 != 1:
        below = (value - 1) // 4 * 4 + 1
        raise ValueError(
            f"must be 1 more than a multiple of 4, found {value}. Nearest: {below} or {below + 4}"
        )
    return value


def _pipeline_name(value: str) -> str:
    if value not in PIPELINES:
        near = nearest(value, PIPELINES)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ValueError(f"unknown pipeline {value!r}.{hint} Known: {', '.join(PIPELINES)}")
    return value


def _empty_section(value: object) -> object:
    return {} if value is None else value  # a section whose lines are all commented out reads as null


Side = Annotated[PositiveInt, Field(json_schema_extra={"multipleOf": 16}), AfterValidator(_side)]
_SECTION = BeforeValidator(_empty_section)


class GenerationConfig(ConfigModel):
    """Size, length and guidance of the video, and what it is made from."""

    height: Side = 480
    """Height in pixels, a multiple of 16."""
    width: Side = 832
    """Width in pixels, a multiple of 16."""
    num_frames: Annotated[PositiveInt, AfterValidator(_frames)] = 81
    """Frames of the video: 1 more than a multiple of 4."""
    num_inference_steps: PositiveInt = 50
    """Denoising steps."""
    guidance_scale: NonNegative = 5.0
    """Strength of classifier-free guidance; up to 1 means none."""
    guidance_scale_2: NonNegative | None = None
    """The same for the second expert of a two-expert model; null uses `guidance_scale`."""
    seed: Annotated[Count, Field(lt=2**64)] = 0
    """Seed of the noise and of everything else that is drawn."""
    prompt: Text | None = None
    """What the video shows; needs a checkpoint with a text encoder."""
    negative_prompt: Text | None = None
    """What it should not show."""
    prompt_embeds: PathText | None = None
    """A `.safetensors` file of prompt embeddings, in place of `prompt`."""
    image: PathText | None = None
    """For image-conditioned models: a picture, a `.safetensors` file of condition latents, or `seeded`."""

    @field_validator("prompt_embeds")
    @classmethod
    def _one_prompt(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("prompt") is not None:
            raise ValueError("give either prompt or prompt_embeds, not both")
        return value


class PipelineConfig(ConfigModel):
    """One pipeline file. Relative paths in it are relative to the current directory."""

    pipeline: Annotated[
        Text, Field(json_schema_extra={"enum": list(PIPELINES)}), AfterValidator(_pipeline_name)
    ]
    """Family of the model."""
    model: PathText
    """Name of a preset, or a checkpoint folder in diffusers' format."""
    attention: Annotated[AttentionConfig, _SECTION, NameShorthand()] = AttentionConfig()
    """Which backend each role of the model uses."""
    generation: Annotated[GenerationConfig, _SECTION] = GenerationConfig()
    """What to generate."""
    device: Annotated[Text, Field(min_length=1)] = "auto"
    """Device to run on, such as `cuda:1` or `cpu`; `auto` takes a GPU where there is one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type to compute in; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    output: PathText = "omni_attn_output"
    """Folder for what is written."""
    tuned_for: TunedFor | None = None
    """Where `attention` was measured, written by `omni-attn tune`; null for choices that nobody measured."""
