"""Pixels and waves to latents and back, with the VAEs of a checkpoint folder, in float32.

The video VAE reads and gives pixels normalised by ImageNet's mean and deviation; the audio VAE takes the two channels
of a sound as a batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import load_part
from omni_attn.models.minimax_h3.source import MiniMaxH3Source
from omni_attn.models.pictures import open_picture, picture_to_video
from omni_attn.models.runtime import import_extra

_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# As in diffusers' modular pipeline: the posterior of a picture is sampled, and always in the same way.
_POSTERIOR_SEED = 42


def load_vaes(source: MiniMaxH3Source) -> tuple[Any | None, Any | None]:
    """diffusers' AutoencoderKLMiniMaxH3 and ...Audio of the checkpoint, on the CPU, for inference; None if absent.

    Raises:
        ConfigError: one cannot be loaded, or its latents have other channels than the transformer's.
        MissingExtraError: diffusers is not installed.
    """
    channels = source.transformer.in_channels, source.transformer.audio_in_channels
    return (
        _load(source, "vae", "AutoencoderKLMiniMaxH3", channels[0]),
        _load(source, "audio_vae", "AutoencoderKLMiniMaxH3Audio", channels[1]),
    )


def _load(source: MiniMaxH3Source, part: str, class_name: str, channels: int) -> Any | None:
    if source.folder is None or part not in source.parts:
        return None
    folder: Path = source.folder / part
    diffusers = import_extra("diffusers", "Decoding latents")
    vae = load_part(getattr(diffusers, class_name).from_pretrained, folder, torch_dtype=torch.float32)
    if vae.config.latent_channels != channels:
        raise ConfigError(
            f"{folder}: latents of this VAE have {vae.config.latent_channels} channels, those of the transformer "
            f"{channels}. Take both from one checkpoint."
        )
    return vae.eval()


@torch.inference_mode()
def decode_video(vae: Any, latents: Tensor) -> Tensor:
    """A video [3, N, H, W] float32 in -1..1 from one clip's normalised latents [1, C, T, H, W], on their device."""
    vae.to(latents.device)
    mean, deviation = _statistics(vae, latents)
    video: Tensor = vae.decode(latents.float() * deviation + mean, return_dict=False)[0]
    vae.to("cpu")
    return (_pixels(video.float()) * 2 - 1)[0]


@torch.inference_mode()
def decode_audio(vae: Any, latents: Tensor) -> tuple[Tensor, int]:
    """A sound [2, samples] float32 in -1..1 from one clip's normalised latents [1, 2, C, A]; and samples per second."""
    vae.to(latents.device)
    mean, deviation = _statistics(vae, latents[0])
    wave: Tensor = vae.decode(latents[0].float() * deviation + mean, return_dict=False)[0]
    vae.to("cpu")
    return wave.float().reshape(2, -1).clamp(-1, 1), int(vae.config.sampling_rate)


def open_keyframe(path: str, field: str, height: int, width: int, *, is_crop: bool) -> Any:
    """Pillow's picture at the size of the video.

    Args:
        path: of the picture.
        field: key path of the configuration that names it, for error texts.
        height, width: of the video.
        is_crop: it keeps its shape and loses what juts out, as a last keyframe behind a first one does; the first one
            is stretched, since the video should have its shape.

    Raises:
        ConfigError: it cannot be read.
        MissingExtraError: Pillow is not installed.
    """
    picture = open_picture(path, field)
    lanczos = import_extra("PIL.Image", "Reading a picture").Resampling.LANCZOS
    if picture.size == (width, height):
        return picture
    if not is_crop:
        return picture.resize((width, height), lanczos)
    scale = max(width / picture.width, height / picture.height)
    wide, high = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
    left, top = (wide - width) // 2, (high - height) // 2
    return picture.resize((wide, high), lanczos).crop((left, top, left + width, top + height))


@torch.inference_mode()
def encode_keyframe(picture: Any, vae: Any, device: torch.device) -> Tensor:
    """Normalised latents of Pillow's picture at the size of the video, [1, C, 1, H, W] float32 on the CPU."""
    video = picture_to_video(picture, picture.height, picture.width).to(device)
    normalised = ((video + 1) / 2 - _channels(_MEAN, video)) / _channels(_DEVIATION, video)
    posterior = vae.to(device).encode(normalised, return_dict=False)[0]
    latents: Tensor = posterior.sample(generator=torch.Generator().manual_seed(_POSTERIOR_SEED))
    vae.to("cpu")  # the transformer needs the room until there is something to decode
    rounded = latents.to(torch.float16).float().cpu()  # which the model was trained with
    mean, deviation = _statistics(vae, rounded)
    return (rounded - mean) / deviation


def _pixels(video: Tensor) -> Tensor:
    return (video * _channels(_DEVIATION, video) + _channels(_MEAN, video)).clamp(0, 1)


def _statistics(vae: Any, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the VAE's latents over its training set, on the second dimension; 0 and 1 if unstated."""
    mean, deviation = vae.config.latents_mean, vae.config.latents_std
    return _channels(mean or (0.0,), latents), _channels(deviation or (1.0,), latents)


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    shape = [1, -1, *[1] * (like.dim() - 2)]
    return torch.tensor(values, dtype=torch.float32, device=like.device).view(shape)
