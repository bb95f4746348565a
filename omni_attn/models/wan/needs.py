"""How much memory a run takes, known before anything is allocated."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from omni_attn.errors import ConfigError
from omni_attn.models import runtime
from omni_attn.models.checkpoint import read_safetensors_header, resolve_float
from omni_attn.models.runtime import GIB, check_memory
from omni_attn.models.wan.loading import keeps_float32
from omni_attn.models.wan.source import VideoGeometry, WanSource

_SMALLER = ("wan2.1-t2v-1.3b", "wan-tiny")


def weight_bytes(model: nn.Module, dtype: str) -> int:
    """Exact size of all transformers' weights once loaded in this dtype; the model may be on the meta device."""
    itemsize = resolve_float(dtype).itemsize
    return sum(
        parameter.numel() * (4 if keeps_float32(name) else itemsize)
        for name, parameter in model.named_parameters()
    )


def activation_allowance(source: WanSource, geometry: VideoGeometry) -> int:
    """An upper estimate of what one forward holds beside the weights, in bytes.

    Per token in float32: twelve times the model's width (residual stream, normed and modulated copy, query, key, value
    and their rotated forms, attention output), twice the hidden width of the feed-forward, twelve widths more where
    every token has its own modulation, and one more for gates.
    """
    config = source.transformer
    widths = 12 * config.dim + 2 * config.ffn_dim + (12 * config.dim if source.expand_timesteps else 0)
    widths += config.dim if config.gate_compress else 0
    return 4 * geometry.num_tokens * widths


def decode_allowance(source: WanSource, geometry: VideoGeometry) -> int:
    """An upper estimate of what the VAE holds while it decodes, beside its own weights; 0 without one.

    It decodes a latent frame at a time; its widest feature maps have 96 channels (other widths are smaller) at full
    resolution, and about six of them live at once. The whole video is kept in float32.
    """
    if "vae" not in source.parts:
        return 0
    pixels = geometry.height * geometry.width
    return 4 * (6 * 96 * source.vae_temporal + 3 * geometry.num_frames) * pixels


def stored_elements(folder: Path) -> int:
    """Numbers in all safetensors files of a folder, read from their headers.

    Raises:
        ConfigError: a file is broken.
    """
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        header = read_safetensors_header(path)
        try:
            total += sum(math.prod(entry["shape"]) for entry in header.values())
        except (TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} is not a whole safetensors file. Fetch or save the checkpoint again."
            ) from error
    return total


def check_fits(
    model: nn.Module,
    source: WanSource,
    geometry: VideoGeometry,
    device: torch.device,
    dtype: str,
    *,
    encodes_text: bool,
) -> None:
    """Compare all that lives at the same time with what is free on the device.

    The text encoder is released before the transformers are loaded, so the larger of the two counts.

    Raises:
        ConfigError: it does not fit; the text names the model, both numbers and what to do.
    """
    weights = weight_bytes(model, dtype)
    working = max(activation_allowance(source, geometry), decode_allowance(source, geometry))
    if source.folder is not None and "vae" in source.parts:
        working += 4 * stored_elements(source.folder / "vae")
    needed = weights + working
    if encodes_text and source.folder is not None:
        needed = max(needed, stored_elements(source.folder / "text_encoder") * resolve_float(dtype).itemsize)
    free = runtime.available_memory(device)
    advice = []  # what would help, and nothing that would not
    if dtype == "float32" and weight_bytes(model, "bfloat16") + working <= free:
        advice.append("dtype: bfloat16")
    if weights <= free and needed == weights + working:
        advice.append("a smaller video")
    advice.append("a device with more memory")
    if source.folder is None and source.name not in _SMALLER:
        advice.append(f"a smaller preset ({' or '.join(_SMALLER)})")
    check_memory(
        needed,
        device,
        what=(
            f"model: {source.name} ({len(source.experts)} transformer{'s' * (len(source.experts) > 1)}, "
            f"{weights / GIB:.2f} GiB of {dtype} weights, {working / GIB:.2f} GiB allowed for a video of "
            f"{geometry.num_frames} x {geometry.height} x {geometry.width})"
        ),
        advice=f"Choose {' or '.join(filter(None, (', '.join(advice[:-1]), advice[-1])))}.",
    )
