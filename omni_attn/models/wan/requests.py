"""What a person asked a Wan pipeline to generate from: checked against the model, then encoded, loaded or seeded.

Nothing that was given is ignored, and everything that was filled in is a note.
"""

from __future__ import annotations

from typing import Any

import torch

from omni_attn.config import WanGenerationConfig, WanRequest
from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import resolve_float
from omni_attn.models.pictures import SEEDED, is_picture
from omni_attn.models.unusable import unreadable_text, unusable_image
from omni_attn.models.wan.conditions import (
    ImageCondition,
    PromptEmbeddings,
    load_image,
    load_prompt,
    seeded_image,
    seeded_prompt,
)
from omni_attn.models.wan.pixels import encode_picture
from omni_attn.models.wan.source import VideoGeometry, WanSource
from omni_attn.models.wan.text import encode_prompts


def check_request(generation: WanGenerationConfig, source: WanSource) -> None:
    """Nothing if the model can use everything that was asked for.

    Raises:
        ConfigError: it cannot; one problem for each thing.
    """
    problems = [*text_problems(generation, source), *_image_problems(generation, source)]
    if generation.guidance_scale_2 is not None and len(source.experts) == 1:
        problems.append(
            f"generation.guidance_scale_2: {source.name} has one transformer, and this is the scale of a second one. "
            "Leave it out."
        )
    if problems:
        raise ConfigError(*problems)


def encodes_text(generation: WanRequest, source: WanSource) -> bool:
    """Whether this run loads the text encoder."""
    return generation.prompt_embeds is None and _has_text_encoder(source)


def _has_text_encoder(source: WanSource) -> bool:
    return {"text_encoder", "tokenizer"} <= source.parts


def _needs_negative(generation: WanRequest, source: WanSource) -> bool:
    scales = [generation.guidance_scale]
    second = generation.guidance_scale_2 if isinstance(generation, WanGenerationConfig) else None
    if len(source.experts) == 2 and second is not None:
        scales.append(second)
    return max(scales) > 1


def text_problems(generation: WanRequest, source: WanSource) -> list[str]:
    """Why the model cannot use the prompts that were asked for, one for each."""
    problems = []
    for field in ("prompt", "negative_prompt"):
        if getattr(generation, field) is None or _has_text_encoder(source):
            continue
        file = f"prompt_embeds [1, 512, {source.transformer.text_dim}] and optionally negative_prompt_embeds"
        problems.append(
            unreadable_text(f"generation.{field}", source.name, file, is_preset=source.folder is None)
        )
    if generation.negative_prompt is not None and not problems:
        if generation.prompt_embeds is not None:
            problems.append(
                "generation.negative_prompt: prompt_embeds was given as well. Put the negative prompt into that file, "
                "under negative_prompt_embeds."
            )
        elif not _needs_negative(generation, source):
            problems.append(
                f"generation.negative_prompt: nothing is compared with it at guidance_scale "
                f"{generation.guidance_scale}. Set guidance_scale above 1, or leave it out."
            )
    return problems


def _image_problems(generation: WanGenerationConfig, source: WanSource) -> list[str]:
    if generation.image is not None and not (source.needs_image or source.expand_timesteps):
        return [
            f"generation.image: {source.name} makes video from text alone. Leave it out, or choose an image-to-video "
            "model."
        ]
    problem = unusable_image("generation.image", generation.image, source.name, source.parts)
    return [] if problem is None else [problem]


def gather_prompt(
    generation: WanRequest, source: WanSource, device: torch.device, dtype: str
) -> tuple[PromptEmbeddings, tuple[str, ...]]:
    """Prompt embeddings on the CPU, and a note for each that is not the encoding of a given text.

    Raises:
        ConfigError: the file of embeddings does not fit.
        MissingExtraError: a library that reads them is not installed.
    """
    with_negative = _needs_negative(generation, source)
    if generation.prompt_embeds is not None:
        prompt, has_negative = load_prompt(generation.prompt_embeds, source, with_negative=with_negative)
        notes = [f"prompt embeddings: read from {generation.prompt_embeds}"]
        if with_negative and not has_negative:
            notes.append(
                f"negative prompt: zeros, since {generation.prompt_embeds} has no negative_prompt_embeds"
            )
        return prompt, tuple(notes)
    if source.folder is not None and _has_text_encoder(source):
        negative = (generation.negative_prompt or "") if with_negative else None
        text = generation.prompt or ""
        prompt = encode_prompts(source.folder, text, negative, device, resolve_float(dtype))
        return prompt, () if generation.prompt is not None else (
            "prompt: none was given, the empty one was encoded",
        )
    notes = [f"prompt embeddings: seeded (seed {generation.seed}), in place of an encoded prompt"]
    if with_negative:
        notes.append("negative prompt: zeros")
    return seeded_prompt(source, generation.seed, with_negative=with_negative), tuple(notes)


def gather_image(
    generation: WanGenerationConfig,
    source: WanSource,
    geometry: VideoGeometry,
    vae: Any | None,
    device: torch.device,
) -> tuple[ImageCondition | None, tuple[str, ...]]:
    """The image condition, None for video from text alone, and a note unless it was encoded from a picture.

    Raises:
        ConfigError: the file does not fit, or a picture cannot be read or encoded.
        MissingExtraError: a library that reads it is not installed.
    """
    image = generation.image
    if image is None and not source.needs_image:
        return None, ()
    if image is None or image == SEEDED:
        note = f"image condition: seeded latents (seed {generation.seed}), in place of an encoded picture"
        return seeded_image(source, geometry, generation.seed), (note,)
    if not is_picture(image):
        return load_image(image, source, geometry), (f"image condition: read from {image}",)
    return encode_picture(image, source, geometry, vae, device), ()
