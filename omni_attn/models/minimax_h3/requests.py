"""What a person asked MiniMax-H3 to generate from: checked against the model, then encoded, loaded or seeded.

Nothing that was given is ignored, and everything that was filled in is a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni_attn.config import MiniMaxH3GenerationConfig
from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import read_safetensors_header, resolve_float
from omni_attn.models.minimax_h3.conditions import (
    Keyframes,
    Prompt,
    load_keyframe,
    load_prompt,
    seeded_keyframe,
    seeded_prompt,
)
from omni_attn.models.minimax_h3.pixels import encode_keyframe, open_keyframe
from omni_attn.models.minimax_h3.source import JointGeometry, MiniMaxH3Source
from omni_attn.models.minimax_h3.text import encode_prompt
from omni_attn.models.pictures import SEEDED, is_picture
from omni_attn.models.seeding import Stream
from omni_attn.models.unusable import unreadable_text, unusable_image

_TEXT_PARTS = frozenset({"text_encoder", "tokenizer"})
_KEYFRAMES = (("image", Stream.IMAGE), ("last_image", Stream.LAST_IMAGE))


def check_request(generation: MiniMaxH3GenerationConfig, source: MiniMaxH3Source) -> None:
    """Nothing if the model can use everything that was asked for.

    Raises:
        ConfigError: it cannot; one problem for each thing.
    """
    problems = []
    if generation.prompt is not None and not source.parts >= _TEXT_PARTS:
        file = f"prompt_embeds [1, rows, {source.transformer.text_dim}]"
        problems.append(
            unreadable_text("generation.prompt", source.name, file, is_preset=source.folder is None)
        )
    if generation.prompt is not None and not generation.prompt.strip():
        problems.append(
            "generation.prompt: is empty, and the sequence needs a row of text. Write one, or leave it out."
        )
    for field, _ in _KEYFRAMES:
        image = getattr(generation, field)
        if problem := unusable_image(f"generation.{field}", image, source.name, source.parts):
            problems.append(problem)
        elif _is_picture(image) and generation.prompt is not None and "processor" not in source.parts:
            problems.append(
                f"generation.{field}: {image!r} is a picture, which the text encoder sees beside the prompt, and "
                f"{source.name} has no processor/. Add it, or give prompt_embeds in place of prompt."
            )
    if problems:
        raise ConfigError(*problems)


def encodes_text(generation: MiniMaxH3GenerationConfig) -> bool:
    """Whether this run loads the text encoder."""
    return generation.prompt is not None


def expected_text_rows(generation: MiniMaxH3GenerationConfig) -> int:
    """Rows of the prompt, before anything is encoded: as the file of embeddings has it, else `text_tokens`.

    The latter is a guess for a text, whose rows are known only once it is tokenised, and for a file that is no such;
    they are few beside the video's.
    """
    path = Path(generation.prompt_embeds or "")
    try:
        shape: list[int] = read_safetensors_header(path)["prompt_embeds"]["shape"] if path.is_file() else []
    except (ConfigError, KeyError, TypeError):
        shape = []  # gather_prompt tells what is wrong with the file
    return int(shape[-2]) if len(shape) > 1 else generation.text_tokens


def _is_picture(image: str | None) -> bool:
    """Whether a keyframe is given as a picture, not as latents or seeded ones."""
    return image is not None and image != SEEDED and is_picture(image)


def open_pictures(generation: MiniMaxH3GenerationConfig) -> dict[str, Any]:
    """Field -> Pillow's picture at the size of the video, for each keyframe that is one; in packed order.

    Raises:
        ConfigError: one cannot be read.
        MissingExtraError: Pillow is not installed.
    """
    pictures: dict[str, Any] = {}
    for field, _ in _KEYFRAMES:
        image = getattr(generation, field)
        if _is_picture(image):
            size = (generation.height, generation.width)
            is_second = field == "last_image" and generation.image is not None
            pictures[field] = open_keyframe(image, f"generation.{field}", *size, is_crop=is_second)
    return pictures


def gather_prompt(
    generation: MiniMaxH3GenerationConfig,
    source: MiniMaxH3Source,
    pictures: Mapping[str, Any],
    device: torch.device,
    dtype: str,
) -> tuple[Prompt, tuple[str, ...]]:
    """The encoded prompt on the CPU, and a note unless it is the encoding of a given text.

    Raises:
        ConfigError: the file of embeddings does not fit, or the encoder cannot be loaded.
        MissingExtraError: a library that reads them is not installed.
    """
    text_dim = source.transformer.text_dim
    if generation.prompt_embeds is not None:
        note = f"prompt embeddings: read from {generation.prompt_embeds}"
        return load_prompt(generation.prompt_embeds, text_dim), (note,)
    if generation.prompt is None:
        note = (
            f"prompt embeddings: seeded (seed {generation.seed}), {generation.text_tokens} rows in place of an encoded "
            "prompt"
        )
        return seeded_prompt(generation.text_tokens, text_dim, generation.seed), (note,)
    assert source.folder is not None  # check_request refuses a text without an encoder
    shown = list(pictures.values())
    prompt = encode_prompt(source.folder, generation.prompt, shown, text_dim, device, resolve_float(dtype))
    unseen = [f for f, _ in _KEYFRAMES if getattr(generation, f) is not None and f not in pictures]
    notes = (f"prompt: encoded without a look at {' and '.join(unseen)}, given as latents",) if unseen else ()
    return prompt, notes


def gather_keyframes(
    generation: MiniMaxH3GenerationConfig,
    source: MiniMaxH3Source,
    geometry: JointGeometry,
    pictures: Mapping[str, Any],
    vae: Any | None,
    device: torch.device,
) -> tuple[Keyframes | None, tuple[str, ...]]:
    """Both keyframes' latents on the CPU, None for video from text alone; a note for each that is no encoded picture.

    Raises:
        ConfigError: a file does not fit.
        MissingExtraError: a library that reads it is not installed.
    """
    shape = (1, source.transformer.in_channels, 1, *geometry.latent[1:])
    frames: list[Tensor | None] = []
    notes = []
    for field, stream in _KEYFRAMES:
        image = getattr(generation, field)
        if image is None:
            frames.append(None)
        elif field in pictures:
            frames.append(encode_keyframe(pictures[field], vae, device))
        elif image == SEEDED:
            frames.append(seeded_keyframe(shape, generation.seed, stream))
            notes.append(f"{field}: seeded latents (seed {generation.seed}), in place of an encoded picture")
        else:
            frames.append(load_keyframe(image, f"generation.{field}", shape))
            notes.append(f"{field}: read from {image}")
    first, last = frames
    return (Keyframes(first, last) if geometry.keyframes else None), tuple(notes)
