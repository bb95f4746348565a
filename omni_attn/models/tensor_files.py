"""`.safetensors` files that a person names in place of what a pipeline would encode: read, and checked strictly."""

from __future__ import annotations

from pathlib import Path

import torch

from omni_attn.errors import ConfigError
from omni_attn.models.runtime import import_extra


def read_tensors(
    path: str, field: str, required: set[str], optional: set[str], expected: str
) -> dict[str, torch.Tensor]:
    """The file's tensors, all required keys among them and no key beyond required and optional ones.

    Args:
        path: the file.
        field: key path of the configuration that names it, for error texts.
        required, optional: keys.
        expected: what the file should hold, in words, for error texts.

    Raises:
        ConfigError: no such file, no readable one, or other keys.
        MissingExtraError: safetensors is not installed.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{field}: there is no file {path!r}. Give a .safetensors file with {expected}.")
    safetensors = import_extra("safetensors.torch", f"Reading {path}")
    try:
        tensors: dict[str, torch.Tensor] = safetensors.load_file(path)
    except Exception as error:  # the library's SafetensorError has no common base with OSError
        raise ConfigError(
            f"{field}: {path} is not a readable .safetensors file ({error}). Expected {expected}."
        ) from error
    if not required <= set(tensors) <= required | optional:
        raise ConfigError(f"{field}: {path} holds the keys {sorted(tensors)}; expected {expected}.")
    return tensors


def check_numbers(field: str, path: str, key: str, tensor: torch.Tensor) -> None:
    """Nothing if a tensor of a file holds finite floating-point numbers.

    Raises:
        ConfigError: it does not.
    """
    if not tensor.is_floating_point():
        raise ConfigError(f"{field}: {key} in {path} is {tensor.dtype}; expected floating-point numbers.")
    if not tensor.isfinite().all():
        raise ConfigError(
            f"{field}: {key} in {path} holds NaN or infinity, and would spoil every frame. Encode it again."
        )
