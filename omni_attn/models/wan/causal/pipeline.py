"""Streaming: latents of a video chunk by chunk, each denoised with what came before it in the cache.

As Self-Forcing and CausVid do it: all denoising steps of a chunk write the same slots; a last forward with the clean
chunk, at the timestep of the context, leaves there what later chunks see.

Shape letters: B videos, C channels, T latent frames of a video, f those of a chunk, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from omni_attn.errors import MetadataError
from omni_attn.kv_cache import CUDAGraphMode
from omni_attn.models.runtime import Progress, no_progress
from omni_attn.models.wan.causal.cache import CausalCache
from omni_attn.models.wan.causal.model import CausalWanModel
from omni_attn.models.wan.causal.stepping import ChunkStepper
from omni_attn.models.wan.causal.video import CausalVideo
from omni_attn.models.wan.conditions import PromptEmbeddings


@dataclass(eq=False)
class CausalWanPipeline:
    """Video chunk by chunk in latent space.

    Attributes:
        transformer: predicts flow velocities.
        scheduler: a diffusers scheduler that reads a flow velocity; of a distilled transformer, `build_dmd_scheduler`.
        timesteps: of a distilled transformer, in each chunk; None = the scheduler spreads its own.
        context_timestep: of the forward that leaves a clean chunk in the cache.
    """

    transformer: CausalWanModel
    scheduler: Any
    timesteps: tuple[float, ...] | None = None
    context_timestep: float = 0.0

    def __post_init__(self) -> None:
        if self.timesteps is not None and not self.scheduler.config.get("stochastic_sampling", False):
            raise MetadataError(
                f"timesteps came with {type(self.scheduler).__name__}, and steps of a distilled transformer add fresh "
                "noise to the clean latent: use omni_attn.models.wan.dmd.build_dmd_scheduler()."
            )
        if self.transformer.is_dmd and self.timesteps is None:
            raise MetadataError(
                "the transformer is distilled to a few steps, and timesteps is None: give those it was distilled for."
            )

    def start(
        self,
        prompt: PromptEmbeddings,
        *,
        batch_size: int = 1,
        num_frames: int | None = None,
        num_inference_steps: int = 8,
        guidance_scale: float = 1.0,
        layout: str = "auto",
        cudagraph_mode: CUDAGraphMode | str | None = None,
        debug: bool = False,
    ) -> CausalVideo:
        """A video that goes on for as long as it is given noise.

        Args:
            prompt: [1 or B, L, E] embeddings; `negative` is read where the guidance scale is above 1.
            batch_size: B.
            num_frames: T, which the cache has room for; None = no end, for transformers with a window.
            num_inference_steps: of the scheduler, in each chunk; unread where `timesteps` are given.
            guidance_scale: classifier-free guidance; at 1 or below there is one stream for each video, else two.
            layout, cudagraph_mode, debug: see CausalCache and ChunkStepper.

        Raises:
            MetadataError: the prompt does not fit, or guidance has nothing to compare with.
            ConfigError: see CausalCache and ChunkStepper.
        """
        is_guided = guidance_scale > 1
        if is_guided and prompt.negative is None:
            raise MetadataError(
                f"guidance_scale is {guidance_scale}, and guidance above 1 compares with a negative prompt: none was "
                "given. Give PromptEmbeddings.negative (zeros will do) or a scale of 1."
            )
        parts = [prompt.positive] + ([prompt.negative] if is_guided else [])
        model = self.transformer
        text = torch.cat(
            [_rows(part, batch_size).to(model.device, model.dtype) for part in parts if part is not None]
        )
        cache = CausalCache(
            model,
            streams=len(parts) * batch_size,
            num_frames=num_frames,
            text_tokens=text.shape[1],
            layout=layout,
        )
        stepper = ChunkStepper(model, cache, cudagraph_mode=cudagraph_mode, debug=debug)
        with torch.inference_mode():
            cache.begin(model, text)
        return CausalVideo(
            cache,
            stepper,
            batch_size=batch_size,
            guidance_scale=guidance_scale,
            scheduler=self.scheduler,
            timesteps=num_inference_steps if self.timesteps is None else self.timesteps,
            context_timestep=self.context_timestep,
        )

    def stream(
        self,
        prompt: PromptEmbeddings,
        latents: Tensor,
        *,
        num_inference_steps: int = 8,
        guidance_scale: float = 1.0,
        known: Tensor | None = None,
        generator: torch.Generator | None = None,
        progress: Progress = no_progress,
        layout: str = "auto",
        cudagraph_mode: CUDAGraphMode | str | None = None,
    ) -> Iterator[Tensor]:
        """Denoised chunks [B, C, f, H, W] float32, each as soon as it is done; the last one may be shorter.

        Args:
            latents: the noise to start from, [B, C, T, H, W], on the transformer's device.
            known: clean first latents [B, C, K, H, W] to go on from; they are not given back.
            generator: for schedulers that draw noise in their steps.
            progress: wraps the loop over all denoising steps of all chunks.
            prompt, num_inference_steps, guidance_scale, layout, cudagraph_mode: see start.

        Raises:
            MetadataError: inputs that do not fit the transformer or one another.
        """
        if latents.ndim != 5:
            raise MetadataError(
                f"latents have shape {list(latents.shape)}; this pipeline denoises [batch, channels, frames, height, "
                "width]."
            )
        video = self.start(
            prompt,
            batch_size=latents.shape[0],
            num_frames=latents.shape[2] + (0 if known is None else known.shape[2]),
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            layout=layout,
            cudagraph_mode=cudagraph_mode,
        )
        size = self.transformer.plan.chunk_frames
        for part in () if known is None else torch.split(known, size, dim=2):
            video.add(part)
        return video.chunks(torch.split(latents, size, dim=2), generator, progress)

    def __call__(self, prompt: PromptEmbeddings, latents: Tensor, **options: Any) -> Tensor:
        """All chunks one behind the other, [B, C, T, H, W] float32; see stream."""
        return torch.cat(list(self.stream(prompt, latents, **options)), dim=2)


def _rows(embeddings: Tensor, batch_size: int) -> Tensor:
    if embeddings.ndim != 3 or embeddings.shape[0] not in (1, batch_size) or not embeddings.shape[1]:
        raise MetadataError(
            f"Prompt embeddings of shape {list(embeddings.shape)} were given for {batch_size} videos; they must be [1 "
            f"or {batch_size}, at least one row, features]."
        )
    return embeddings.expand(batch_size, -1, -1)
