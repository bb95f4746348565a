"""One video in the making: its next chunk from noise, or from latents that are there.

Shape letters: B videos, C channels, f latent frames of a chunk, H and W latent height and width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from omni_attn.errors import MetadataError
from omni_attn.models.runtime import Progress
from omni_attn.models.wan.causal.cache import CausalCache
from omni_attn.models.wan.causal.stepping import ChunkStepper
from omni_attn.models.wan.dmd import set_dmd_timesteps
from omni_attn.models.wan.pipeline import step_options
from omni_attn.models.wan.rope import RopeTable


class CausalVideo:
    """A video in the making; made by CausalWanPipeline.start.

    Args:
        cache, stepper: of one transformer.
        batch_size: B; the cache has as many streams, or twice as many for guidance.
        guidance_scale: see CausalWanPipeline.start.
        scheduler, context_timestep: see CausalWanPipeline.
        timesteps: those of a distilled transformer, or the number of the scheduler's own.

    Attributes:
        cache: what it keeps.
        stepper: runs its forwards.
        num_steps: denoising steps of a chunk.
    """

    def __init__(
        self,
        cache: CausalCache,
        stepper: ChunkStepper,
        *,
        batch_size: int,
        guidance_scale: float,
        scheduler: Any,
        timesteps: int | tuple[float, ...],
        context_timestep: float,
    ) -> None:
        self.cache, self.stepper = cache, stepper
        self._model, self._scheduler = stepper.model, scheduler
        self._batch_size, self._scale = batch_size, guidance_scale
        self._timesteps, self._context = timesteps, context_timestep
        self._size = torch.Size((0, 0))  # latent height and width, once there are frames
        self._set_timesteps()
        self.num_steps = len(scheduler.timesteps)

    @property
    def first_frame(self) -> int:
        """Latent frames that are done."""
        return self.cache.first_frame

    def chunks(
        self, noise: Sequence[Tensor], generator: torch.Generator | None, progress: Progress
    ) -> Iterator[Tensor]:
        """Denoised chunks, each as soon as it is done; see denoise and CausalWanPipeline.stream."""
        total = len(noise) * self.num_steps
        steps = iter(progress(range(total), total, "denoising"))
        for chunk in noise:
            yield self.denoise(chunk, generator=generator, each_step=steps)
        next(steps, None)  # lets a bar end

    @torch.inference_mode()
    def denoise(
        self,
        noise: Tensor,
        *,
        generator: torch.Generator | None = None,
        each_step: Iterator[object] | None = None,
    ) -> Tensor:
        """The next chunk from its noise [B, C, f, H, W]: clean latents of that shape, float32.

        Args:
            noise: on the transformer's device; f is at most that of a chunk.
            generator: for schedulers that draw noise in their steps.
            each_step: is asked for the next thing before each denoising step.

        Raises:
            MetadataError: the shape does not fit.
            KVCacheError: the video is longer than it was said to be.
        """
        self._check(noise)
        scheduler, sample = self._scheduler, noise.float()
        self._set_timesteps()
        options = step_options(scheduler, generator)
        self.cache.open(noise.shape[2])
        try:
            rope = self._rope(noise)
            for timestep in scheduler.timesteps:
                if each_step is not None:
                    next(each_step)
                velocity = self._velocity(sample, timestep, rope)
                sample = scheduler.step(velocity, timestep, sample, return_dict=False, **options)[0]
            self._write(sample, rope)
        except BaseException:  # so that the chunk can be tried again
            self.cache.discard()
            raise
        self.cache.commit()
        return sample

    @torch.inference_mode()
    def add(self, latents: Tensor) -> None:
        """Goes on from clean latents [B, C, f, H, W] as if they had been denoised here.

        Raises:
            MetadataError, KVCacheError: see denoise.
        """
        self._check(latents)
        self.cache.open(latents.shape[2])
        try:
            self._write(latents.float(), self._rope(latents))
        except BaseException:
            self.cache.discard()
            raise
        self.cache.commit()

    def _write(self, clean: Tensor, rope: RopeTable) -> None:
        """Leaves the clean chunk in the slots that its denoising steps wrote."""
        context = torch.full((), self._context, device=clean.device)
        self._forward(clean, context, rope)

    def _velocity(self, sample: Tensor, timestep: Tensor, rope: RopeTable) -> Tensor:
        velocity = self._forward(sample, timestep, rope).float()
        if self._scale <= 1:
            return velocity
        guided, unguided = velocity.chunk(2)
        return unguided + self._scale * (guided - unguided)

    def _forward(self, sample: Tensor, timestep: Tensor, rope: RopeTable) -> Tensor:
        """Of all streams at once: guided ones first, then those of the negative prompt."""
        streams = len(self.cache.streams)
        rows = sample.to(self._model.dtype).repeat(streams // self._batch_size, 1, 1, 1, 1)
        return self.stepper.velocity(rows, timestep.expand(streams), rope)

    def _rope(self, latents: Tensor) -> RopeTable:
        grid = self._model.config.token_grid(*latents.shape[2:])
        return self._model.rope(grid, self.cache.first_frame)

    def _set_timesteps(self) -> None:
        """The steps of a chunk, from their beginning."""
        scheduler, device = self._scheduler, self._model.device
        if isinstance(self._timesteps, int):
            scheduler.set_timesteps(self._timesteps, device=device)
        else:
            set_dmd_timesteps(scheduler, device, self._timesteps)
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)

    def _check(self, latents: Tensor) -> None:
        config, plan = self._model.config, self._model.plan
        if latents.ndim != 5 or latents.shape[:2] != (self._batch_size, config.out_channels):
            raise MetadataError(
                f"latents have shape {list(latents.shape)}; this video needs [{self._batch_size}, "
                f"{config.out_channels}, frames, height, width]."
            )
        _, height, width = config.token_grid(*latents.shape[2:])
        patches = zip(latents.shape[3:], config.patch_size[1:], strict=True)
        if any(size % patch for size, patch in patches) or height * width != plan.frame_tokens:
            raise MetadataError(
                f"latents of {latents.shape[3]} x {latents.shape[4]} have {height} x {width} tokens a frame, and the "
                f"transformer was built for frames of {plan.frame_tokens}: build it for this size."
            )
        size = latents.shape[3:]
        if self.first_frame and size != self._size:  # as many tokens, at other places
            raise MetadataError(
                f"latents of {size[0]} x {size[1]} came after frames of {self._size[0]} x {self._size[1]}: all chunks "
                "of a video have one size. Start another video for another."
            )
        self._size = size
