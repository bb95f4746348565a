"""How much memory a run takes, known before anything is allocated."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from omni_attn.models import memory
from omni_attn.models.checkpoint import resolve_float
from omni_attn.models.memory import check_run_fits, stored_elements
from omni_attn.models.wan.loading import keeps_float32
from omni_attn.models.wan.source import VideoGeometry, WanSource

_SMALLER = ("wan2.1-t2v-1.3b", "wan-tiny")


def weight_bytes(model: nn.Module, dtype: str) -> int:
    """Exact size of all transformers' weights once loaded in this dtype; the model may be on the meta device."""
    return memory.weight_bytes(model, dtype, keeps_float32)


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


def check_fits(
    model: nn.Module,
    source: WanSource,
    geometry: VideoGeometry,
    device: torch.device,
    dtype: str,
    *,
    encodes_text: bool,
    kept: int = 0,
    at_once: VideoGeometry | None = None,
) -> None:
    """Compare all that lives at the same time with what is free on the device.

    The text encoder is released before the transformers are loaded, so the larger of the two counts.

    Args:
        kept: bytes that live from the first step to the last, as those of a KV cache.
        at_once: what one forward and the VAE see of the video; None = all of it.

    Raises:
        ConfigError: it does not fit; the text names the model, both numbers and what to do.
    """
    part = at_once or geometry
    working = max(activation_allowance(source, part), decode_allowance(source, part)) + kept
    if source.folder is not None and "vae" in source.parts:
        working += 4 * stored_elements(source.folder / "vae")
    encoder = 0
    if encodes_text and source.folder is not None:
        encoder = stored_elements(source.folder / "text_encoder") * resolve_float(dtype).itemsize
    is_large_preset = source.folder is None and source.name not in _SMALLER
    check_run_fits(
        partial(weight_bytes, model),
        working,
        device,
        dtype,
        name=source.name,
        transformers=len(source.experts),
        video=f"{geometry.num_frames} x {geometry.height} x {geometry.width}",
        before=encoder,
        presets=_SMALLER if is_large_preset else (),
    )
