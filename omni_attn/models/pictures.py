"""Pictures that a person conditions a video on, as the numbers an encoder reads."""

from __future__ import annotations

from typing import Any

import torch

from omni_attn.errors import ConfigError
from omni_attn.models.runtime import import_extra

SEEDED = "seeded"
"""Value of `generation.image` that asks for a made-up picture."""


def is_picture(image: str) -> bool:
    """Whether the file of this name is a picture; the others are `.safetensors` files of what encoding one gives."""
    return not image.lower().endswith(".safetensors")


def open_picture(path: str, field: str = "generation.image") -> Any:
    """Pillow's picture, in RGB; `field` is the key path of the configuration that names it.

    Raises:
        ConfigError: it cannot be read.
        MissingExtraError: Pillow is not installed.
    """
    pillow = import_extra("PIL.Image", "Reading a picture")
    try:
        with pillow.open(path) as picture:
            return picture.convert("RGB")
    except OSError as error:
        raise ConfigError(
            f"{field}: {path!r} cannot be read as a picture ({error}). Give a picture file, or a .safetensors "
            "file of condition latents."
        ) from error


def picture_to_video(picture: Any, height: int, width: int) -> torch.Tensor:
    """[1, 3, 1, height, width] float32 in -1..1, resized to that size."""
    pillow = import_extra("PIL.Image", "Reading a picture")
    resized = picture.resize((width, height), pillow.Resampling.LANCZOS)
    pixels = torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(height, width, 3).permute(2, 0, 1).float() / 127.5 - 1
    return pixels[None, :, None]
