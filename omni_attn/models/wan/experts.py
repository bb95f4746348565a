"""What a checkpoint folder tells of its transformers, and of the latents that they are made for.

Reads only small JSON files and the names of weights: no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import stored_names
from omni_attn.models.folders import WEIGHTS, read_part
from omni_attn.models.gates import has_gates
from omni_attn.models.wan.config import WanConfig

_VAE_CLASS = "AutoencoderKLWan"


class ReadConfig(Protocol):
    """How a parsed config.json becomes parameters, see WanConfig.from_dict."""

    def __call__(self, values: Mapping[str, Any], *, source: str) -> WanConfig: ...


def read_expert(folder: Path, read: ReadConfig) -> WanConfig:
    """A transformer's parameters: those in config.json, and whether its weights have gates."""
    values = read_part(folder / "config.json")
    config = read(values, source=str(folder / "config.json"))
    if "gate_compress" in values:
        return config
    return replace(config, gate_compress=has_gates(stored_names(folder, WEIGHTS)))


def check_experts(folder: Path, experts: tuple[WanConfig, ...], boundary_ratio: float | None) -> None:
    """Nothing if so many transformers and this share of the steps go together.

    Raises:
        ConfigError: they do not.
    """
    is_number = isinstance(boundary_ratio, (int, float)) and not isinstance(boundary_ratio, bool)
    if boundary_ratio is not None and not (is_number and 0 <= boundary_ratio <= 1):
        raise ConfigError(
            f"{folder / 'model_index.json'}: boundary_ratio is {boundary_ratio!r}, and must be a number from 0 to 1, "
            "or null. Correct it, or fetch the checkpoint again."
        )
    if (boundary_ratio is not None) != (len(experts) == 2):
        raise ConfigError(
            f"{folder / 'model_index.json'}: boundary_ratio is {boundary_ratio} with {len(experts)} transformer(s). "
            "Two experts need both transformer_2/ and a boundary_ratio, one expert has neither; complete the folder."
        )
    if len(experts) == 2 and (experts[0].in_channels, experts[0].out_channels) != (
        experts[1].in_channels,
        experts[1].out_channels,
    ):
        raise ConfigError(
            f"{folder}: transformer reads {experts[0].in_channels} channels and gives {experts[0].out_channels}, "
            f"transformer_2 {experts[1].in_channels} and {experts[1].out_channels}. Experts of one pipeline share "
            "both; take the two folders from the same checkpoint."
        )


def vae_factors(
    folder: Path, parts: frozenset[str], transformer: WanConfig
) -> tuple[int, int, tuple[str, ...]]:
    """Pixels and frames per latent pixel and frame, from vae/config.json or else from the latent channels.

    Raises:
        ConfigError: vae/ is none of a Wan model.
    """
    if "vae" in parts:
        config = read_part(folder / "vae" / "config.json")
        if (class_name := config.get("_class_name", _VAE_CLASS)) != _VAE_CLASS:
            raise ConfigError(
                f"{folder / 'vae' / 'config.json'}: _class_name is {class_name!r}, and latents of Wan are decoded by "
                f"{_VAE_CLASS}. Take vae/ from a Wan checkpoint."
            )
        factors = [config.get("scale_factor_spatial", 8), config.get("scale_factor_temporal", 4)]
        if not all(isinstance(factor, int) and factor > 0 for factor in factors):
            raise ConfigError(
                f"{folder / 'vae' / 'config.json'}: scale_factor_spatial and scale_factor_temporal are {factors}, and "
                "must be positive integers. Fetch or save the checkpoint again."
            )
        return factors[0], factors[1], ()
    spatial = (
        16 if transformer.out_channels == 48 else 8
    )  # the two Wan VAEs: 48 channels at 1/16, 16 channels at 1/8
    note = (
        f"{folder} has no vae/: sizes are computed for a VAE with {spatial} pixels and 4 frames per latent "
        f"({transformer.out_channels} latent channels), and no pixels can be decoded"
    )
    return spatial, 4, (note,)
