"""What a denoising loop hands to the transformers, prepared once: embeddings, conditions, attention records.

Dimensions in names: B batch, C channels, T latent frames, H and W latent height and width, L tokens, E features, S the
tokens of the video.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.models.wan.conditions import ImageCondition, PromptEmbeddings
from omni_attn.models.wan.config import Grid, WanConfig
from omni_attn.models.wan.model import WanModel


@dataclass(frozen=True, eq=False, kw_only=True)
class LoopInputs:
    """All that stays the same over the loop, on the device and in the dtype that the transformers read.

    Attributes:
        positive: prompt embeddings [B, L, E].
        negative: those to steer away from [B, L, E], or None.
        image_embeds: input of the CLIP branch, or None.
        concatenated: mask and condition latents [B, C, T, H, W] that follow the noisy ones on channels, or None.
        first_frame: the known latent frame of TI2V [B, C, 1, H, W] float32, or None.
        known_tokens: per-token time (TI2V): [S] bool, True where the first frame is given; None = one time for all.
        records: what each kind of attention call looks like, by role.
        lengths: (query tokens, key tokens) by role.
    """

    dtype: torch.dtype
    positive: torch.Tensor
    negative: torch.Tensor | None
    image_embeds: torch.Tensor | None
    concatenated: torch.Tensor | None
    first_frame: torch.Tensor | None
    known_tokens: torch.Tensor | None
    records: Mapping[str, AttentionMetadata]
    lengths: Mapping[str, tuple[int, int]]

    def blend(self, sample: torch.Tensor) -> torch.Tensor:
        """The sample [B, C, T, H, W] with what is known of it in place."""
        if self.first_frame is None:
            return sample
        return torch.cat([self.first_frame, sample[:, :, 1:]], dim=2)

    def model_input(self, sample: torch.Tensor) -> torch.Tensor:
        """What a transformer reads as hidden states: [B, in_channels, T, H, W]."""
        if self.concatenated is None:
            return self.blend(sample).to(self.dtype)
        return torch.cat([sample, self.concatenated], dim=1).to(self.dtype)

    def timesteps(self, timestep: torch.Tensor) -> torch.Tensor:
        """The time of each sample, [B], or of each token, [B, S] float32; known tokens are at time 0."""
        batch_size = self.positive.shape[0]
        if self.known_tokens is None:
            return timestep.expand(batch_size)
        return (
            timestep.float()
            .expand(self.known_tokens.shape)
            .masked_fill(self.known_tokens, 0)
            .expand(batch_size, -1)
        )


def build_loop_inputs(
    model: WanModel,
    latents: torch.Tensor,
    prompt: PromptEmbeddings,
    condition: ImageCondition | None,
    *,
    expand_timesteps: bool,
) -> LoopInputs:
    """Check everything against the transformer and the latents, and bring it to their device.

    Args:
        model: the transformer, or the first of two, which read the same inputs.
        latents: [B, C, T, H, W] noise.
        prompt: [1 or B, L, E] embeddings.
        condition: see `ImageCondition`; its batch is 1 or B.
        expand_timesteps: TI2V.

    Raises:
        MetadataError: something does not fit; both shapes are named.
    """
    config, dtype = model.config, model.dtype
    batch_size, grid = _check_latents(config, latents)
    _check_condition(config, latents, condition, expand_timesteps)
    tokens = grid[0] * grid[1] * grid[2]
    first_frame = known_tokens = concatenated = None
    if expand_timesteps:
        known_tokens = torch.zeros(tokens, dtype=torch.bool, device=latents.device)
        if condition is not None:
            first_frame = _expand(condition.latents.to(latents.device), batch_size)
            known_tokens[: grid[1] * grid[2]] = True  # raster order: the first frame's tokens come first
    elif condition is not None and config.in_channels > config.out_channels:
        parts = [part for part in (condition.mask, condition.latents) if part is not None]
        concatenated = torch.cat([_expand(part.to(latents.device), batch_size) for part in parts], dim=1)

    def embeddings(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else _expand(tensor.to(latents.device, dtype), batch_size)

    positive = embeddings(prompt.positive)
    assert positive is not None
    image_embeds = embeddings(_one_entry_per_video(config, condition))
    return LoopInputs(
        dtype=dtype,
        positive=positive,
        negative=embeddings(prompt.negative),
        image_embeds=image_embeds,
        concatenated=concatenated,
        first_frame=first_frame,
        known_tokens=known_tokens,
        records=model.attention_records(grid),
        lengths=model.attention_lengths(
            grid,
            text_tokens=positive.shape[1],
            image_tokens=None if image_embeds is None else image_embeds.shape[1],
        ),
    )


def _expand(tensor: torch.Tensor, batch_size: int) -> torch.Tensor:
    if tensor.shape[0] not in (1, batch_size):
        raise MetadataError(
            f"An input of shape {list(tensor.shape)} was given for {batch_size} videos; its first dimension must be 1 "
            f"(the same for all) or {batch_size}."
        )
    return tensor.expand(batch_size, *tensor.shape[1:])


def _one_entry_per_video(config: WanConfig, condition: ImageCondition | None) -> torch.Tensor | None:
    """Image tokens with those of two pictures joined: [2B, L, E] becomes [B, 2L, E]."""
    if condition is None or condition.image_embeds is None or config.pos_embed_seq_len is None:
        return None if condition is None else condition.image_embeds
    return condition.image_embeds.reshape(-1, config.pos_embed_seq_len, condition.image_embeds.shape[-1])


def _check_latents(config: WanConfig, latents: torch.Tensor) -> tuple[int, Grid]:
    if latents.dim() != 5 or latents.shape[1] != config.out_channels:
        raise MetadataError(
            f"latents have shape {list(latents.shape)}; this transformer denoises [batch, {config.out_channels}, "
            "frames, height, width]."
        )
    sizes = tuple(latents.shape[2:])
    if any(size % patch for size, patch in zip(sizes, config.patch_size, strict=True)):
        raise MetadataError(
            f"latents have {sizes} frames, rows and columns, which patches of {config.patch_size} do not divide. "
            "Choose sizes that are multiples of the patch."
        )
    return latents.shape[0], config.token_grid(*sizes)


def _check_condition(
    config: WanConfig, latents: torch.Tensor, condition: ImageCondition | None, expand_timesteps: bool
) -> None:
    extra = config.in_channels - config.out_channels
    if condition is None:
        if extra or config.image_dim is not None:
            raise MetadataError(
                f"This transformer reads {config.in_channels} channels, {extra} of them an image condition, and none "
                "was given. Give an ImageCondition."
            )
        return
    if not extra and not expand_timesteps:
        raise MetadataError(
            "An image condition was given to a text-to-video transformer, which has no channels for it. Leave it out, "
            "or choose an image-to-video model."
        )
    if (condition.image_embeds is None) != (config.image_dim is None):
        raise MetadataError(
            f"image_embeds are {'absent' if condition.image_embeds is None else 'given'}, and this transformer has "
            f"{'no image branch' if config.image_dim is None else 'an image branch'}. Give them exactly if it has one."
        )
    channels = condition.latents.shape[1] + (0 if condition.mask is None else condition.mask.shape[1])
    wanted = config.out_channels if expand_timesteps else extra
    frames = 1 if expand_timesteps else latents.shape[2]
    found = (channels, *condition.latents.shape[2:])
    if found != (wanted, frames, *latents.shape[3:]):
        raise MetadataError(
            f"The image condition has {channels} channels (mask and latents) of {list(found[1:])}; this "
            f"transformer and these latents need {wanted} of {[frames, *latents.shape[3:]]}."
        )
