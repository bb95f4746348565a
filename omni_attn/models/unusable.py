"""Inputs that a person gave and a pipeline cannot use: why, and what to give instead."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from omni_attn.models.pictures import SEEDED, is_picture


def unreadable_text(field: str, name: str, file: str, *, is_preset: bool) -> str:
    """Why a text is refused by a pipeline that has no text encoder.

    Args:
        field: key path of the configuration that holds the text.
        name: of the pipeline.
        file: what the file that may be given instead holds, in words.
        is_preset: the pipeline is one.
    """
    what = "is a preset, and presets have" if is_preset else "has"
    return (
        f"{field}: {name} {what} no text encoder (text_encoder/ and tokenizer/), so text cannot be read. Give "
        f"generation.prompt_embeds, a .safetensors file with {file}, or leave the text out."
    )


def unusable_image(field: str, image: str | None, name: str, parts: Collection[str]) -> str | None:
    """Why an image condition cannot be used; None where it can, or where none was given.

    Args:
        field: key path of the configuration that holds it.
        image: a picture, a file of latents, or SEEDED.
        name: of the pipeline.
        parts: what the pipeline has beside its transformers.
    """
    if image is None or image == SEEDED:
        return None
    if not Path(image).is_file():
        return (
            f"{field}: there is no file {image!r}. Give a picture, a .safetensors file of condition latents, or "
            f"{SEEDED!r}."
        )
    if is_picture(image) and "vae" not in parts:
        return (
            f"{field}: {image!r} is a picture, and {name} has no vae/ to encode it. Give a .safetensors file with "
            f"condition_latents, or {SEEDED!r}."
        )
    return None
