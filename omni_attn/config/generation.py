"""What to generate: what every family of models is asked, and what each asks beyond that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from omni_attn.config.base import (
    ConfigModel,
    Count,
    NonNegative,
    PathText,
    PositiveInt,
    Text,
    unknown_key,
)


def _sizes(step: int, offset: int, rule: str) -> Callable[[int], int]:
    def check(value: int) -> int:
        if (value - offset) % step:
            below = (value - offset) // step * step + offset
            near = " or ".join(str(size) for size in (below, below + step) if size > 0)
            raise ValueError(f"must be {rule}, found {value}. Nearest: {near}")
        return value

    return check


Side = Annotated[
    PositiveInt,
    Field(json_schema_extra={"multipleOf": 16}),
    AfterValidator(_sizes(16, 0, "a positive multiple of 16")),
]
WideSide = Annotated[
    PositiveInt,
    Field(json_schema_extra={"multipleOf": 32}),
    AfterValidator(_sizes(32, 0, "a positive multiple of 32")),
]
Frames = Annotated[PositiveInt, AfterValidator(_sizes(4, 1, "1 more than a multiple of 4"))]
GroupedFrames = Annotated[
    Annotated[int, Field(strict=True, ge=5)], AfterValidator(_sizes(17, 5, "5 more than a multiple of 17"))
]


class GenerationConfig(ConfigModel):
    """What every family is asked: size, length and steps of the video, its seed and its prompt."""

    height: PositiveInt
    """Height in pixels."""
    width: PositiveInt
    """Width in pixels."""
    num_frames: PositiveInt
    """Frames of the video."""
    num_inference_steps: PositiveInt
    """Denoising steps."""
    seed: Annotated[Count, Field(lt=2**64)] = 0
    """Seed of the noise and of everything else that is drawn."""
    prompt: Text | None = None
    """What the video shows; needs a checkpoint with a text encoder."""
    prompt_embeds: PathText | None = None
    """A `.safetensors` file of prompt embeddings, in place of `prompt`."""

    #: Why this family has no such key, for keys that others have.
    absent: ClassVar[Mapping[str, str]] = MappingProxyType({})

    #: Whether checkpoints of this family come as adapters too.
    takes_adapter: ClassVar[bool] = False

    #: Whether models of this family keep keys and values of earlier tokens in pages.
    keeps_kv_cache: ClassVar[bool] = False

    #: Whether models of this family run with their sequence split over processes.
    splits_sequence: ClassVar[bool] = True

    @classmethod
    def unknown_key_text(cls, key: str) -> str:
        """The message for a key that is no field; one of another family says why it is none here."""
        return cls.absent[key] if key in cls.absent else unknown_key(key, list(cls.model_fields))

    @field_validator("prompt_embeds")
    @classmethod
    def _one_prompt(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("prompt") is not None:
            raise ValueError("give either prompt or prompt_embeds, not both")
        return value


_CHUNKS = (
    "Videos of this family are made whole, not chunk by chunk. Leave it out, or choose pipeline: wan_causal"
)
_NO_CHUNKS = dict.fromkeys(
    ("chunk_frames", "window_frames", "sink_frames", "timesteps", "context_timestep"), _CHUNKS
)
ONE_LENGTH = "Wan pads every prompt to the same number of rows. Leave it out"


class WanRequest(GenerationConfig):
    """What every Wan pipeline is asked."""

    height: Side = 480
    """Height in pixels, a multiple of 16."""
    width: Side = 832
    """Width in pixels, a multiple of 16."""
    num_frames: Frames = 81
    """Frames of the video: 1 more than a multiple of 4."""
    num_inference_steps: PositiveInt = 50
    """Denoising steps."""
    guidance_scale: NonNegative = 5.0
    """Strength of classifier-free guidance; up to 1 means none."""
    negative_prompt: Text | None = None
    """What it should not show."""


class WanGenerationConfig(WanRequest):
    """Size, length and guidance of the video, and what it is made from."""

    guidance_scale_2: NonNegative | None = None
    """The same for the second expert of a two-expert model; null uses `guidance_scale`."""
    image: PathText | None = None
    """For image-conditioned models: a picture, a `.safetensors` file of condition latents, or `seeded`."""

    absent: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "last_image": "Wan reads one condition: a first-last-frame model takes the latents of both pictures from "
            "the file that `image` names. Leave it out, or choose pipeline: minimax_h3",
            "text_tokens": ONE_LENGTH,
            **_NO_CHUNKS,
        }
    )


_DISTILLED = "MiniMax-H3 is guidance-distilled: a step is one forward, with no other prompt to compare with."


class MiniMaxH3GenerationConfig(GenerationConfig):
    """Size and length of the video, and what it is made from; the sound is as long as the video."""

    takes_adapter: ClassVar[bool] = True

    height: WideSide = 768
    """Height in pixels, a multiple of 32."""
    width: WideSide = 1344
    """Width in pixels, a multiple of 32."""
    num_frames: GroupedFrames = 124
    """Frames of the video, 24 in a second: 5 more than a multiple of 17."""
    num_inference_steps: Annotated[int, Field(strict=True, ge=2)] = 50
    """Points of the schedule, its end among them: the model runs once less."""
    text_tokens: PositiveInt = 30
    """Rows of a made-up prompt, where neither `prompt` nor `prompt_embeds` is given."""
    image: PathText | None = None
    """First frame: a picture, a `.safetensors` file of its latents, or `seeded`."""
    last_image: PathText | None = None
    """Last frame, likewise; with or without a first one."""

    absent: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "guidance_scale": f"{_DISTILLED} Leave it out",
            "guidance_scale_2": f"{_DISTILLED} Leave it out",
            "negative_prompt": f"{_DISTILLED} Leave it out, and say in `prompt` what the video shows",
            **_NO_CHUNKS,
        }
    )

    @field_validator("text_tokens")
    @classmethod
    def _rows_of_a_made_up_prompt(cls, value: int, info: ValidationInfo) -> int:
        given = next((name for name in ("prompt", "prompt_embeds") if info.data.get(name) is not None), None)
        if given is not None and value != cls.model_fields["text_tokens"].default:
            raise ValueError(f"{given} is given, and has rows of its own. Leave text_tokens out")
        return value
