"""What a video that is made chunk by chunk is asked."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from omni_attn.config.base import SEQUENCE, Count, NonNegative, PositiveInt, Timestep
from omni_attn.config.generation import ONE_LENGTH, WanRequest

_FROM_TEXT = "a causal model makes video from text. Leave it out, or choose pipeline: wan"


class WanCausalGenerationConfig(WanRequest):
    """Size, length and chunks of a video that is made chunk by chunk, and what it is made from."""

    keeps_kv_cache: ClassVar[bool] = True
    splits_sequence: ClassVar[bool] = False

    num_inference_steps: PositiveInt = 8
    """Denoising steps of each chunk."""
    guidance_scale: NonNegative = 1.0
    """Strength of classifier-free guidance, which takes a second stream of pages; up to 1 means none."""
    chunk_frames: PositiveInt = 3
    """Latent frames that are denoised together; one is four frames of the video."""
    window_frames: PositiveInt | None = None
    """The last latent frames that a chunk sees, its own among them; null keeps all."""
    sink_frames: Count = 0
    """The first latent frames, which every chunk sees beside its window."""
    timesteps: Annotated[tuple[NonNegative, ...], SEQUENCE, Field(min_length=1)] | None = None
    """Timesteps of a distilled model, from at most 1000 downwards; null takes those of the checkpoint."""
    context_timestep: Timestep = 0.0
    """Timestep of the forward that leaves a clean chunk in the cache."""

    absent: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "guidance_scale_2": "A causal model has one transformer, and this is the scale of a second. Leave it out",
            "image": f"There is no picture to begin with: {_FROM_TEXT}",
            "last_image": f"There is no picture to end with: {_FROM_TEXT}",
            "text_tokens": ONE_LENGTH,
        }
    )

    @field_validator("window_frames")
    @classmethod
    def _holds_a_chunk(cls, value: int | None, info: ValidationInfo) -> int | None:
        chunk = info.data.get("chunk_frames", 1)
        if value is not None and value < chunk:
            raise ValueError(
                f"must be at least chunk_frames, {chunk}, since a chunk sees itself; found {value}"
            )
        return value

    @field_validator("sink_frames")
    @classmethod
    def _beside_a_window(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("window_frames", 1) is None:
            raise ValueError(
                f"must be 0 without window_frames, which would forget the first frames; found {value}"
            )
        return value

    @field_validator("timesteps")
    @classmethod
    def _downwards(cls, value: tuple[float, ...] | None, info: ValidationInfo) -> tuple[float, ...] | None:
        if value is None:
            return value
        if value[0] > 1000 or value[-1] <= 0 or any(a <= b for a, b in pairwise(value)):
            raise ValueError(f"must go down from at most 1000 and stay above 0, found {list(value)}")
        default = cls.model_fields["num_inference_steps"].default
        if info.data.get("num_inference_steps", default) not in (default, len(value)):
            raise ValueError(
                f"has {len(value)} steps, and num_inference_steps is {info.data['num_inference_steps']}. Leave that out"
            )
        return value
