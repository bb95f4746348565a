"""The denoising loop of Wan 2.1 and 2.2: one or two experts, guidance, image conditions, per-token timesteps.

Everything works on latents [B, C, T, H, W] (T latent frames); text, pictures and pixels are encoded and decoded
elsewhere. Sampling does what diffusers' `WanPipeline` and `WanImageToVideoPipeline` do; tests hold the results equal.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.models.agreement import check_alike
from omni_attn.models.runtime import Progress, no_progress
from omni_attn.models.wan.conditions import ImageCondition, PromptEmbeddings
from omni_attn.models.wan.dmd import check_dmd_call, check_dmd_scheduler, set_dmd_timesteps
from omni_attn.models.wan.loop import LoopInputs, build_loop_inputs
from omni_attn.models.wan.model import WanModel
from omni_attn.preparation import prepare_attention


@dataclass(eq=False)
class Wan22Pipeline:
    """Wan 2.1 and 2.2 video generation in latent space, with any flow-matching scheduler of diffusers.

    Attributes:
        transformer: the only expert, or the one for high noise. If it is distilled (`is_dmd`), it is sampled in the
            steps it was distilled for, without guidance.
        scheduler: a diffusers scheduler that reads a flow velocity (UniPCMultistepScheduler, FlowMatchEuler...);
            `build_dmd_scheduler()` for a distilled transformer.
        transformer_2: the low-noise expert.
        boundary_ratio: `transformer` serves timesteps >= boundary_ratio * num_train_timesteps, `transformer_2` the
            others; None exactly if there is one expert.
        expand_timesteps: TI2V, every token has its own timestep.
    """

    transformer: WanModel
    scheduler: Any
    transformer_2: WanModel | None = None
    boundary_ratio: float | None = None
    expand_timesteps: bool = False

    def __post_init__(self) -> None:
        if (self.transformer_2 is None) != (self.boundary_ratio is None):
            raise MetadataError(
                f"Wan22Pipeline: boundary_ratio is {self.boundary_ratio} and transformer_2 is "
                f"{'absent' if self.transformer_2 is None else 'given'}; the ratio says where transformer_2 takes "
                "over, so give both or neither."
            )
        second = self.transformer if self.transformer_2 is None else self.transformer_2
        if second.parallel is not self.transformer.parallel:
            raise MetadataError(
                "Wan22Pipeline: transformer and transformer_2 split a video over different ranks, and serve one loop; "
                "build both inside the same use_parallel(...)."
            )
        if self.transformer.is_dmd:
            check_dmd_scheduler(self.scheduler, two_experts=self.transformer_2 is not None)

    @torch.inference_mode()
    def __call__(
        self,
        prompt: PromptEmbeddings,
        latents: torch.Tensor,
        *,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_scale_2: float | None = None,
        condition: ImageCondition | None = None,
        generator: torch.Generator | None = None,
        progress: Progress = no_progress,
    ) -> torch.Tensor:
        """Denoised latents, [B, C, T, H, W] float32 on the device of the input; the same on each of several ranks.

        Args:
            prompt: [1 or B, L, E] embeddings; `negative` is read where a guidance scale is above 1.
            latents: the noise to start from, [B, C, T, H, W], on the transformers' device.
            num_inference_steps: steps of the scheduler; None means 50, or those of a distilled transformer.
            guidance_scale: classifier-free guidance; at 1 or below the second forward is skipped. None means 5, or 1
                for a distilled transformer.
            guidance_scale_2: the low-noise expert's own scale; None means `guidance_scale`.
            condition: what is known of the video: needed by I2V and FLF2V, optional for TI2V, refused for T2V.
            generator: for schedulers that draw noise in their steps.
            progress: wraps the loop over timesteps.

        Raises:
            MetadataError: inputs that do not fit the transformers or one another, or differ between ranks.
        """
        if self.transformer.parallel is not None:  # before anything that one rank alone may refuse
            check_alike(
                self.transformer.parallel,
                {"num_inference_steps": num_inference_steps}
                | {"guidance_scale": guidance_scale, "guidance_scale_2": guidance_scale_2}
                | _named_tensors(latents, prompt, condition)
                | {"generator": noise_state(self.scheduler, generator, latents.device)},
            )
        if self.transformer.is_dmd:
            check_dmd_call(num_inference_steps, guidance_scale)
        if guidance_scale is None:
            guidance_scale = 1.0 if self.transformer.is_dmd else 5.0
        scales = self._scales(guidance_scale, guidance_scale_2, prompt)
        sample = latents.float()
        inputs = build_loop_inputs(
            self.transformer, sample, prompt, condition, expand_timesteps=self.expand_timesteps
        )
        if self.transformer.is_dmd:
            set_dmd_timesteps(self.scheduler, sample.device)
        else:
            steps = 50 if num_inference_steps is None else num_inference_steps
            self.scheduler.set_timesteps(steps, device=sample.device)
        if hasattr(self.scheduler, "set_begin_index"):
            self.scheduler.set_begin_index(0)  # saves a device-to-host search for the index in every step
        timesteps = self.scheduler.timesteps
        on_host = timesteps.tolist()  # read once: comparing on the device would wait for it in every step
        sigmas = _sigmas(self.scheduler, on_host)
        options = step_options(self.scheduler, generator)
        if self.transformer.parallel is not None:
            check_alike(self.transformer.parallel, {"scheduler": (type(self.scheduler).__name__, on_host)})
        records = inputs.records
        for index in progress(range(len(on_host)), len(on_host), "denoising"):
            is_low_noise = self._is_low_noise(on_host[index])
            model = self.transformer_2 if is_low_noise else self.transformer
            assert model is not None
            records = {  # each from the one before, so that what was prepared travels along
                role: record.at_step(step=index, num_steps=len(on_host), sigma=sigmas[index])
                for role, record in records.items()
            }
            velocity = _guided_velocity(
                model, inputs, sample, timesteps[index], scales[is_low_noise], records
            )
            sample = self.scheduler.step(velocity, timesteps[index], sample, return_dict=False, **options)[0]
        return inputs.blend(sample)

    def _scales(
        self, guidance_scale: float, guidance_scale_2: float | None, prompt: PromptEmbeddings
    ) -> dict[bool, float]:
        """Guidance by "is low noise", once everything that could be ignored is refused."""
        if guidance_scale_2 is not None and self.transformer_2 is None:
            raise MetadataError(
                f"guidance_scale_2 is {guidance_scale_2}, and this pipeline has one transformer: it is the scale of a "
                "second expert. Leave it out."
            )
        scales = {
            False: guidance_scale,
            True: guidance_scale if guidance_scale_2 is None else guidance_scale_2,
        }
        if prompt.negative is None and max(scales.values()) > 1:
            raise MetadataError(
                f"The guidance scale is {max(scales.values())}, and guidance above 1 compares with a negative prompt: "
                "none was given. Give PromptEmbeddings.negative (zeros will do) or a scale of 1."
            )
        return scales

    def _is_low_noise(self, timestep: float) -> bool:
        if self.boundary_ratio is None:
            return False
        return timestep < self.boundary_ratio * float(self.scheduler.config.num_train_timesteps)


def _guided_velocity(
    model: WanModel,
    inputs: LoopInputs,
    sample: torch.Tensor,
    timestep: torch.Tensor,
    scale: float,
    records: Mapping[str, AttentionMetadata],
) -> torch.Tensor:
    """One expert's flow velocity with guidance, [B, C, T, H, W] float32.

    Two forwards instead of a batch of two: the same arithmetic at half the memory, and both share one preparation.
    """
    prepare_attention(model, records, lengths=inputs.lengths)
    hidden_states, times = inputs.model_input(sample), inputs.timesteps(timestep)

    def forward(prompt: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model(
            hidden_states, times, prompt, inputs.image_embeds, attention_records=records
        )
        return output.float()

    velocity = forward(inputs.positive)
    if scale <= 1:
        return velocity
    assert inputs.negative is not None
    unguided = forward(inputs.negative)
    return unguided + scale * (velocity - unguided)


def _sigmas(scheduler: Any, timesteps: list[float]) -> list[float]:
    """The noise level of each step, 1 = noise to 0 = clean, for backends whose sparsity depends on it."""
    sigmas = getattr(scheduler, "sigmas", None)
    if sigmas is None or len(sigmas) < len(timesteps):
        return [timestep / scheduler.config.num_train_timesteps for timestep in timesteps]
    return [float(sigma) for sigma in sigmas[: len(timesteps)].tolist()]


def _named_tensors(
    latents: torch.Tensor, prompt: PromptEmbeddings, condition: ImageCondition | None
) -> dict[str, torch.Tensor | None]:
    """What a loop starts from, by the names of its arguments."""
    named = {"latents": latents, "prompt.positive": prompt.positive, "prompt.negative": prompt.negative}
    if condition is None:
        return named
    return named | {f"condition.{name}": tensor for name, tensor in vars(condition).items()}


def noise_state(
    scheduler: Any, generator: torch.Generator | None, device: torch.device
) -> torch.Tensor | None:
    """The state of what a scheduler's `step` draws noise from; None if it draws none."""
    draws = "generator" in inspect.signature(scheduler.step).parameters
    if not draws or scheduler.config.get("stochastic_sampling") is False:
        return None
    if generator is not None:
        return generator.get_state()
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state()
    return state


def step_options(scheduler: Any, generator: torch.Generator | None) -> dict[str, torch.Generator]:
    """What a scheduler's `step` takes besides: the generator, if it draws noise."""
    if generator is None or "generator" not in inspect.signature(scheduler.step).parameters:
        return {}
    return {"generator": generator}
