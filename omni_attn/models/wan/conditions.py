"""Prompt embeddings and image conditions: from a `.safetensors` file, or seeded where a person gave none.

Dimensions in names: B batch, C channels, T latent frames, H and W latent height and width, L tokens, E features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_attn.errors import ConfigError
from omni_attn.models.seeding import Stream, seeded_generator
from omni_attn.models.tensor_files import check_numbers, read_tensors
from omni_attn.models.wan.config import TEXT_TOKENS
from omni_attn.models.wan.source import VideoGeometry, WanSource


@dataclass(frozen=True, eq=False)
class PromptEmbeddings:
    """What cross-attention reads: `positive` and `negative`, both [1, L, E] float32; negative None = not needed."""

    positive: torch.Tensor
    negative: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class ImageCondition:
    """What an image-conditioned model knows about its video.

    Attributes:
        latents: normalised condition latents, [B, C, T, H, W] float32, or [B, C, 1, H, W] for TI2V's first frame.
        mask: for models that concatenate it, [B, vae_temporal, T, H, W] float32, 1 where a frame is given; else None.
        image_embeds: the CLIP branch's input, [B, L, E] float32; None for models without that branch.
    """

    latents: torch.Tensor
    mask: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None


def seeded_prompt(source: WanSource, seed: int, *, with_negative: bool) -> PromptEmbeddings:
    """Normal noise in place of an encoded prompt; zeros, which is what padding looks like, for the negative one."""
    shape = (1, TEXT_TOKENS, source.transformer.text_dim)
    positive = torch.randn(shape, generator=seeded_generator(seed, Stream.PROMPT))
    return PromptEmbeddings(positive, torch.zeros(shape) if with_negative else None)


def load_prompt(path: str, source: WanSource, *, with_negative: bool) -> tuple[PromptEmbeddings, bool]:
    """Prompt embeddings from a file with the keys `prompt_embeds` and, if wanted, `negative_prompt_embeds`.

    Each is [1, L, E] or [L, E] with L up to 512 (shorter ones are padded with zero rows, as Wan pads prompts). A
    negative prompt that the file lacks is all zeros.

    Returns:
        The embeddings, and whether the file holds a negative prompt.

    Raises:
        ConfigError: no such file, keys or shapes; the text holds those found and those expected.
    """
    wanted = (1, TEXT_TOKENS, source.transformer.text_dim)
    expected = f"prompt_embeds (and optionally negative_prompt_embeds) of shape {list(wanted)}"
    tensors = read_tensors(
        path, "generation.prompt_embeds", {"prompt_embeds"}, {"negative_prompt_embeds"}, expected
    )
    padded = {key: _pad_rows(path, key, tensor, wanted) for key, tensor in tensors.items()}
    negative = padded.get("negative_prompt_embeds", torch.zeros(wanted)) if with_negative else None
    return PromptEmbeddings(padded["prompt_embeds"], negative), "negative_prompt_embeds" in padded


def _pad_rows(path: str, key: str, tensor: torch.Tensor, wanted: tuple[int, int, int]) -> torch.Tensor:
    rows = tensor[None] if tensor.dim() == 2 else tensor
    if (
        rows.dim() != 3
        or rows.shape[0] != 1
        or not 0 < rows.shape[1] <= wanted[1]
        or rows.shape[2] != wanted[2]
    ):
        raise ConfigError(
            f"generation.prompt_embeds: {key} in {path} has shape {list(tensor.shape)}; expected {list(wanted)}, or "
            "fewer rows. Encode the prompt with the text encoder of this model."
        )
    check_numbers("generation.prompt_embeds", path, key, tensor)
    embeddings = torch.zeros(wanted)
    embeddings[:, : rows.shape[1]] = rows.float()
    return embeddings


def seeded_image(source: WanSource, geometry: VideoGeometry, seed: int) -> ImageCondition:
    """Normal noise in place of an encoded picture, with the mask that a picture would have."""
    generator = seeded_generator(seed, Stream.IMAGE)
    return ImageCondition(
        torch.randn(condition_shape(source, geometry), generator=generator),
        known_frames_mask(source, geometry),
        None if (shape := image_embeds_shape(source)) is None else torch.randn(shape, generator=generator),
    )


def load_image(path: str, source: WanSource, geometry: VideoGeometry) -> ImageCondition:
    """Condition latents from a file with the key `condition_latents`, and `image_embeds` if the model has that branch.

    Condition latents are normalised as the noisy ones are (mean 0, deviation 1 over the training set). An optional
    `mask` replaces the usual one, which marks the first frame (and the last, for first-last-frame models) as given.

    Raises:
        ConfigError: no such file, keys or shapes; the text holds those found and those expected.
    """
    shapes: dict[str, tuple[int, ...]] = {"condition_latents": condition_shape(source, geometry)}
    optional: dict[str, tuple[int, ...]] = {}
    if (embeds := image_embeds_shape(source)) is not None:
        shapes["image_embeds"] = embeds
    if (mask := known_frames_mask(source, geometry)) is not None:
        optional["mask"] = tuple(mask.shape)
    expected = ", ".join(f"{key} of shape {list(shape)}" for key, shape in shapes.items())
    tensors = read_tensors(path, "generation.image", set(shapes), set(optional), expected)
    for key, tensor in tensors.items():
        if tuple(tensor.shape) != (wanted := {**shapes, **optional}[key]):
            raise ConfigError(
                f"generation.image: {key} in {path} has shape {list(tensor.shape)}; expected {list(wanted)} for "
                f"{geometry.num_frames} frames of {geometry.height} x {geometry.width}. "
                "Encode the picture at that size."
            )
        check_numbers("generation.image", path, key, tensor)
    known = tensors.get("mask", mask)
    embeddings = tensors.get("image_embeds")
    return ImageCondition(
        tensors["condition_latents"].float(),
        None if known is None else known.float(),
        None if embeddings is None else embeddings.float(),
    )


def condition_shape(source: WanSource, geometry: VideoGeometry) -> tuple[int, ...]:
    """Shape of the condition latents: all frames where they are concatenated, the first one for TI2V."""
    frames, height, width = geometry.latent
    return (1, source.latent_channels, 1 if source.expand_timesteps else frames, height, width)


def image_embeds_shape(source: WanSource) -> tuple[int, ...] | None:
    """Shape of the CLIP branch's input, or None without that branch. Two pictures' tokens follow one another."""
    if source.transformer.image_dim is None:
        return None
    return (1, source.num_image_tokens, source.transformer.image_dim)


def known_frames_mask(source: WanSource, geometry: VideoGeometry) -> torch.Tensor | None:
    """[1, vae_temporal, T, H, W] float32: 1 where a pixel frame is given; None where no mask is concatenated.

    Channel j of latent frame t stands for pixel frame vae_temporal * (t - 1) + 1 + j; latent frame 0 holds the first
    pixel frame alone, so all its channels repeat that one (diffusers, WanImageToVideoPipeline.prepare_latents).
    """
    if not source.condition_channels:
        return None
    frames, height, width = geometry.latent
    known = torch.zeros(geometry.num_frames)
    known[0] = 1
    if source.has_last_frame:
        known[-1] = 1
    per_channel = (
        torch.cat([known[:1].expand(source.vae_temporal), known[1:]]).view(frames, source.vae_temporal).T
    )
    return per_channel[None, :, :, None, None].expand(1, -1, -1, height, width).contiguous()
