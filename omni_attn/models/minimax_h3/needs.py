"""How much memory a run takes, known before anything is allocated."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from omni_attn.config import ParallelConfig
from omni_attn.models import memory
from omni_attn.models.checkpoint import resolve_float
from omni_attn.models.memory import check_run_fits, exchanged_tokens, stored_elements
from omni_attn.models.minimax_h3.loading import keeps_float32
from omni_attn.models.minimax_h3.source import JointGeometry, MiniMaxH3Source
from omni_attn.parallel.shards import Shards

_SMALLER = ("minimax-h3-tiny",)
_ONE_PROCESS = ParallelConfig()


def weight_bytes(model: nn.Module, dtype: str, *, is_factorised: bool = False) -> int:
    """Exact size of the transformer's weights once loaded in this dtype; the model may be on the meta device.

    Args:
        model: holds it as a child, or is it.
        dtype: name of what it is loaded in.
        is_factorised: it has an `adaln_rank`.
    """

    def keeps(name: str) -> bool:
        return keeps_float32(name.removeprefix("transformer."), is_factorised=is_factorised)

    return memory.weight_bytes(model, dtype, keeps)


def activation_allowance(
    source: MiniMaxH3Source,
    geometry: JointGeometry,
    text_rows: int,
    dtype: str,
    parallel: ParallelConfig = _ONE_PROCESS,
) -> int:
    """An upper estimate of what one forward holds beside the weights, in bytes, on the rank that holds most.

    Per row in the model's dtype: six widths of the residual stream (itself, normed and modulated copies, gathered
    modulation), seven of the heads together (query, key, value and their rotated forms, attention output; one more for
    a gate), three times the hidden width of the feed-forward; and in float32 what enters and leaves the model.

    A rank holds so much for its own rows, what enters and leaves for all, and the buffers of one layer's exchanges.
    """
    config = source.transformer
    rows = geometry.num_rows(text_rows)
    own = max(Shards.even(rows, parallel.size).sizes)
    heads = (7 + config.gate_compress) * config.inner_dim
    widths = 6 * config.hidden_size + heads + 3 * config.ffn_dim
    ends = 4 * (2 * config.hidden_size * own + 4 * config.patch_dim * rows)
    exchanged = exchanged_tokens(rows, config.num_attention_heads, parallel, gated=config.gate_compress)
    return resolve_float(dtype).itemsize * (own * widths + exchanged * config.inner_dim) + ends


def decode_allowance(source: MiniMaxH3Source, geometry: JointGeometry) -> int:
    """An upper estimate of what the video VAE holds while it decodes, beside its weights; 0 without one.

    It decodes tile by tile; the whole video is kept in float32, once in tiles and once joined, and once as pixels.
    """
    if "vae" not in source.parts:
        return 0
    return 4 * 3 * 3 * geometry.num_frames * geometry.height * geometry.width


def check_fits(
    model: nn.Module,
    source: MiniMaxH3Source,
    geometry: JointGeometry,
    text_rows: int,
    device: torch.device,
    dtype: str,
    *,
    encodes_text: bool,
    parallel: ParallelConfig = _ONE_PROCESS,
) -> None:
    """Compare all that lives at the same time with what is free on the device.

    The text encoder is released before the transformer is loaded, so the larger of the two counts.

    Args:
        parallel: over how many processes the rows are split; each has a device and all weights.

    Raises:
        ConfigError: it does not fit; the text names the model, both numbers and what to do.
    """
    working = max(
        activation_allowance(source, geometry, text_rows, dtype, parallel),
        decode_allowance(source, geometry),
    )
    encoder = 0
    if source.folder is not None:
        working += sum(
            4 * stored_elements(source.folder / part) for part in {"vae", "audio_vae"} & source.parts
        )
        if encodes_text:
            encoder = stored_elements(source.folder / "text_encoder") * resolve_float(dtype).itemsize
    is_factorised = source.transformer.adaln_rank is not None
    check_run_fits(
        partial(weight_bytes, model, is_factorised=is_factorised),
        working,
        device,
        dtype,
        name=source.name,
        transformers=1,
        video=f"{geometry.num_frames} x {geometry.height} x {geometry.width}",
        before=encoder,
        presets=() if source.folder is not None or source.is_small else _SMALLER,
    )
