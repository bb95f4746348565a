"""Pixels of a chunk as soon as its latents are there, from the VAE's memory of the chunks before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omni_attn.models.runtime import import_extra
from omni_attn.models.wan.pixels import latent_statistics

_REMEMBERING = "WanCausalConv3d"  # diffusers' convolution that takes the frames before its own from a memory


class ChunkDecoder:
    """Decodes one clip's latents chunk by chunk; all chunks together are what decoding them at once gives.

    Args:
        vae: diffusers' AutoencoderKLWan, in float32.
    """

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        convolutions = [m for m in vae.decoder.modules() if type(m).__name__ == _REMEMBERING]
        self._memory: list[Tensor | None] = [None] * len(convolutions)
        self._is_first = True

    @torch.inference_mode()
    def __call__(self, latents: Tensor) -> Tensor:
        """The next frames [3, N, H, W] float32 in -1..1, from normalised latents [1, C, f, H, W], on their device."""
        vae = self._vae.to(latents.device)
        mean, deviation = latent_statistics(vae, latents)
        features = vae.post_quant_conv(latents.float() * deviation + mean)
        frames = []
        for frame in features.split(1, dim=2):
            # The index counts on within a call, and begins anew with each.
            frames.append(
                vae.decoder(frame, feat_cache=self._memory, feat_idx=[0], first_chunk=self._is_first)
            )
            self._is_first = False
        video = torch.cat(frames, dim=2)
        if vae.config.patch_size is not None:
            wan_vae = import_extra("diffusers.models.autoencoders.autoencoder_kl_wan", "Decoding latents")
            video = wan_vae.unpatchify(video, patch_size=vae.config.patch_size)
        return video[0].clamp(-1, 1)
