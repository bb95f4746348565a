"""How much memory a run takes, known before anything is allocated."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from omni_attn.config import ParallelConfig
from omni_attn.models import memory
from omni_attn.models.checkpoint import resolve_float
from omni_attn.models.memory import check_run_fits, exchanged_tokens, stored_elements
from omni_attn.models.wan.loading import keeps_float32
from omni_attn.models.wan.source import VideoGeometry, WanSource
from omni_attn.parallel.shards import Shards

_SMALLER = ("wan2.1-t2v-1.3b", "wan-tiny")
_ONE_PROCESS = ParallelConfig()


def weight_bytes(model: nn.Module, dtype: str) -> int:
    """Exact size of all transformers' weights once loaded in this dtype; the model may be on the meta device."""
    return memory.weight_bytes(model, dtype, keeps_float32)


def activation_allowance(
    source: WanSource, geometry: VideoGeometry, parallel: ParallelConfig = _ONE_PROCESS
) -> int:
    """An upper estimate of what one forward holds beside the weights, in bytes, on the rank that holds most.

    Per token in float32: twelve times the model's width (residual stream, normed and modulated copy, query, key, value
    and their rotated forms, attention output), twice the hidden width of the feed-forward, twelve widths more where
    every token has its own modulation, and one more for gates.

    A rank holds so much for its own tokens, and the buffers of one layer's exchanges.
    """
    config = source.transformer
    tokens = max(Shards.even(geometry.num_tokens, parallel.size).sizes)
    widths = 12 * config.dim + 2 * config.ffn_dim + (12 * config.dim if source.expand_timesteps else 0)
    widths += config.dim if config.gate_compress else 0
    exchanged = exchanged_tokens(
        geometry.num_tokens, config.num_attention_heads, parallel, gated=config.gate_compress
    )
    return 4 * (tokens * widths + config.dim * exchanged)


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
    parallel: ParallelConfig = _ONE_PROCESS,
) -> None:
    """Compare all that lives at the same time with what is free on the device.

    The text encoder is released before the transformers are loaded, so the larger of the two counts.

    Args:
        kept: bytes that live from the first step to the last, as those of a KV cache.
        at_once: what one forward and the VAE see of the video; None = all of it.
        parallel: over how many processes it is split; each has a device and all weights.

    Raises:
        ConfigError: it does not fit; the text names the model, both numbers and what to do.
    """
    part = at_once or geometry
    working = max(activation_allowance(source, part, parallel), decode_allowance(source, part)) + kept
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
