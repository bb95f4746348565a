"""Shapes of one forward call, checked before any work, with both numbers in the text."""

from __future__ import annotations

from torch import Tensor

from omni_attn.errors import MetadataError
from omni_attn.models.wan.config import Grid, WanConfig


def check_inputs(
    config: WanConfig, hidden_states: Tensor, timestep: Tensor, text: Tensor, image: Tensor | None
) -> Grid:
    """The token grid of a call whose tensors fit the model and one another.

    Raises:
        MetadataError: they do not.
    """
    grid, batch = check_latent_inputs(config, hidden_states, timestep), hidden_states.shape[0]
    if text.ndim != 3 or text.shape[0] != batch or text.shape[2] != config.text_dim:
        raise MetadataError(
            f"encoder_hidden_states has shape {list(text.shape)}; this model needs [{batch}, text tokens, "
            f"{config.text_dim}]."
        )
    _check_image(config, image, batch)
    return grid


def check_latent_inputs(config: WanConfig, hidden_states: Tensor, timestep: Tensor) -> Grid:
    """The token grid of latents that fit the model and their timesteps.

    Raises:
        MetadataError: they do not.
    """
    grid = _token_grid(config, hidden_states)
    batch = hidden_states.shape[0]
    tokens = grid[0] * grid[1] * grid[2]
    if (
        timestep.ndim not in (1, 2)
        or timestep.shape[0] not in (1, batch)
        or timestep.shape[1:].numel() not in (1, tokens)
    ):
        raise MetadataError(
            f"timestep has shape {list(timestep.shape)}; with {batch} latents of {tokens} tokens it must be "
            f"[{batch}], or [{batch}, {tokens}] with one timestep per token in raster order."
        )
    return grid


def _token_grid(config: WanConfig, hidden_states: Tensor) -> Grid:
    if hidden_states.ndim != 5 or hidden_states.shape[1] != config.in_channels:
        hint = ""
        if hidden_states.ndim == 5 and config.in_channels > config.out_channels:
            hint = " Join noise, mask and condition latent on the channels, in that order."
        raise MetadataError(
            f"hidden_states has shape {list(hidden_states.shape)}; this model needs [batch, "
            f"{config.in_channels}, frames, height, width].{hint}"
        )
    grid = config.token_grid(*hidden_states.shape[2:])
    for name, size, patch, tokens in zip(
        ("frames", "height", "width"), hidden_states.shape[2:], config.patch_size, grid, strict=True
    ):
        if size % patch or not tokens:
            raise MetadataError(f"the latent's {name}, {size}, is not a multiple of the patch size {patch}.")
        if tokens > config.rope_max_seq_len:
            raise MetadataError(
                f"the latent's {name} gives {tokens} positions and rope_max_seq_len is "
                f"{config.rope_max_seq_len}; ask for a smaller video."
            )
    return grid


def _check_image(config: WanConfig, image: Tensor | None, batch: int) -> None:
    if image is None:
        if config.image_dim is not None:
            raise MetadataError(
                "encoder_hidden_states_image is absent, and this model was trained with an image branch "
                f"(image_dim {config.image_dim}). Hand in CLIP tokens [{batch}, tokens, {config.image_dim}]."
            )
        return
    if config.image_dim is None:
        raise MetadataError(
            f"encoder_hidden_states_image of shape {list(image.shape)} came to a model without an image "
            "branch (image_dim null). Leave it out."
        )
    positions = config.pos_embed_seq_len
    if positions is None:
        fits, wanted = image.shape[:-2] == (batch,), f"[{batch}, tokens, {config.image_dim}]"
    else:
        joined, apart = [batch, positions, config.image_dim], [2 * batch, positions // 2, config.image_dim]
        fits, wanted = list(image.shape) in (joined, apart), f"{joined} or {apart}"
    if not fits or image.shape[-1] != config.image_dim:
        raise MetadataError(
            f"encoder_hidden_states_image has shape {list(image.shape)}; this model needs {wanted}."
        )
