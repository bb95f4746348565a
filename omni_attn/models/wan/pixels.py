"""Pixels to condition latents and latents to pixels, with the VAE and CLIP encoder of a checkpoint folder.

The VAE runs in float32, as its authors do: it is small, and its rounding is visible.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import load_part
from omni_attn.models.pictures import open_picture, picture_to_video
from omni_attn.models.runtime import import_extra
from omni_attn.models.wan.conditions import ImageCondition, known_frames_mask
from omni_attn.models.wan.source import VideoGeometry, WanSource


def load_vae(source: WanSource) -> Any | None:
    """diffusers' AutoencoderKLWan of the checkpoint, on the CPU in float32, for inference; None if it has none.

    Raises:
        ConfigError: it cannot be loaded, or its latents have other channels than the transformer's.
    """
    if source.folder is None or "vae" not in source.parts:
        return None
    folder = source.folder / "vae"
    diffusers = import_extra("diffusers", "Decoding latents")
    vae = load_part(diffusers.AutoencoderKLWan.from_pretrained, folder, torch_dtype=torch.float32)
    if vae.config.z_dim != source.latent_channels:
        raise ConfigError(
            f"{folder}: latents of this VAE have {vae.config.z_dim} channels, those of the transformer "
            f"{source.latent_channels}. Take both from one checkpoint."
        )
    return vae.eval()


@torch.inference_mode()
def decode_latents(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """A video [3, N, H, W] float32 in -1..1 from one clip's normalised latents [1, C, T, H, W], on their device."""
    vae.to(latents.device)
    mean, deviation = latent_statistics(vae, latents)
    video: torch.Tensor = vae.decode(latents.float() * deviation + mean, return_dict=False)[0]
    return video[0]


@torch.inference_mode()
def encode_picture(
    path: str, source: WanSource, geometry: VideoGeometry, vae: Any, device: torch.device
) -> ImageCondition:
    """What an image-to-video model is told about a video that starts with this picture.

    Raises:
        ConfigError: not a readable picture, or the model needs more than one picture or a missing CLIP encoder.
    """
    assert source.folder is not None
    if source.has_last_frame:
        raise ConfigError(
            f"generation.image: {source.name} continues a first and a last frame, and {path!r} is one picture. Give a "
            ".safetensors file with condition_latents and image_embeds of both."
        )
    picture = open_picture(path)
    first = picture_to_video(picture, geometry.height, geometry.width).to(device)
    if not source.expand_timesteps:  # unknown frames are grey before encoding
        first = torch.cat(
            [first, first.new_zeros(1, 3, geometry.num_frames - 1, geometry.height, geometry.width)], dim=2
        )
    encoded = vae.to(device).encode(first).latent_dist.mode()
    vae.to("cpu")  # the transformers need the room until there is something to decode
    mean, deviation = latent_statistics(vae, encoded)
    image_embeds = None
    if source.transformer.image_dim is not None:
        image_embeds = _encode_clip(picture, source, source.folder, device)
    return ImageCondition((encoded - mean) / deviation, known_frames_mask(source, geometry), image_embeds)


def latent_statistics(vae: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of the VAE's latents over its training set, [1, C, 1, 1, 1] each."""
    mean, deviation = (
        torch.tensor(values, dtype=torch.float32, device=latents.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return mean, deviation


def _encode_clip(picture: Any, source: WanSource, folder: Path, device: torch.device) -> torch.Tensor:
    """CLIP's hidden states before its last layer, [1, L, E] float32."""
    for part in ("image_encoder", "image_processor"):
        if part not in source.parts:
            raise ConfigError(
                f"generation.image: {source.name} has an image branch, and {folder / part} is missing, so a picture "
                "cannot be encoded. Add it, or give a .safetensors file with condition_latents and image_embeds."
            )
    transformers = import_extra("transformers", "Encoding a picture")
    processor = load_part(transformers.CLIPImageProcessor.from_pretrained, folder / "image_processor")
    encoder = load_part(
        transformers.CLIPVisionModel.from_pretrained, folder / "image_encoder", dtype=torch.float32
    )
    inputs = processor(images=picture, return_tensors="pt").to(device)
    states: torch.Tensor = encoder.to(device).eval()(**inputs, output_hidden_states=True).hidden_states[-2]
    return states.float()
