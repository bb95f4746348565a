"""Checkpoints distilled to a few steps by distribution matching (DMD): FastWan.

A step takes the flow velocity v at noise level s to the clean latent, x0 = x - s * v, and adds fresh noise for the next
level s': (1 - s') * x0 + s' * noise; the last step keeps x0. No guidance: it is distilled in. The timesteps were fixed
in training, and the noise level of a timestep is that of the nearest of the 1000 steps of the shifted schedule, as in
FastVideo's DmdDenoisingStage. diffusers' FlowMatchEulerDiscreteScheduler with `stochastic_sampling` takes these steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omni_attn.config import WanGenerationConfig
from omni_attn.errors import ConfigError, MetadataError
from omni_attn.models.runtime import import_extra
from omni_attn.models.wan.presets import DMD_FLOW_SHIFT
from omni_attn.models.wan.source import WanSource

DMD_TIMESTEPS = (1000, 757, 522)
_STEPS = len(DMD_TIMESTEPS)


def build_dmd_scheduler(flow_shift: float = DMD_FLOW_SHIFT) -> Any:
    """diffusers' scheduler that goes to the clean latent and adds fresh noise in each step.

    Raises:
        MissingExtraError: diffusers is not installed.
    """
    diffusers = import_extra("diffusers", "Sampling")
    return diffusers.FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=flow_shift, stochastic_sampling=True
    )


def set_dmd_timesteps(
    scheduler: Any, device: torch.device, timesteps: Sequence[float] = DMD_TIMESTEPS
) -> None:
    """Sets these timesteps, each with the noise level of the nearest step of the schedule distilled on."""
    train, shift = scheduler.config.num_train_timesteps, scheduler.shift
    even = torch.arange(1, train + 1, dtype=torch.float64) / train
    shifted = shift * even / (1 + (shift - 1) * even) * train
    nearest = [even[(shifted - timestep).abs().argmin()].item() for timestep in timesteps]
    # The scheduler shifts the levels itself, and leaves the timesteps as they are.
    scheduler.set_timesteps(sigmas=nearest, timesteps=list(timesteps), device=device)


def dmd_generation(
    generation: WanGenerationConfig, source: WanSource
) -> tuple[WanGenerationConfig, tuple[str, ...]]:
    """The request with the steps and guidance of a distilled checkpoint, and a note if the file left them open.

    Raises:
        ConfigError: the request asks for other steps, or for guidance.
    """
    if not source.is_dmd:
        return generation, ()
    stated = {
        name: getattr(generation, name)
        for name in ("num_inference_steps", "guidance_scale")
        if name in generation.model_fields_set
    }
    try:
        check_dmd_call(stated.get("num_inference_steps"), stated.get("guidance_scale"))
    except MetadataError as error:
        raise ConfigError(f"generation: {source.name}: {error}") from None
    settled = {"num_inference_steps": _STEPS, "guidance_scale": 1.0} | stated
    note = (
        f"steps: timesteps {', '.join(map(str, DMD_TIMESTEPS))} without guidance, as {source.name} was "
        "distilled for them"
    )
    return generation.model_copy(update=settled), () if len(stated) == 2 else (note,)


def check_dmd_call(num_inference_steps: int | None, guidance_scale: float | None) -> None:
    """Nothing if a distilled transformer can be sampled so; None = not stated.

    Raises:
        MetadataError: other steps, or guidance.
    """
    if num_inference_steps not in (None, _STEPS):
        raise MetadataError(
            f"num_inference_steps is {num_inference_steps}, and the model is distilled to {_STEPS} steps, at timesteps "
            f"{', '.join(map(str, DMD_TIMESTEPS))}: leave num_inference_steps out."
        )
    if guidance_scale is not None and guidance_scale > 1:
        raise MetadataError(
            f"guidance_scale is {guidance_scale}, and guidance is distilled into the model, which would apply it "
            "twice: leave guidance_scale out, or set it to 1."
        )


def check_dmd_scheduler(scheduler: Any, *, two_experts: bool) -> None:
    """Nothing if this scheduler takes the steps of a distilled transformer.

    Raises:
        MetadataError: it does not, or the transformer has a second one beside it.
    """
    if two_experts:
        raise MetadataError(
            "a distilled transformer came with transformer_2, and how two of them share three steps is not known here: "
            "leave transformer_2 out."
        )
    if not scheduler.config.get("stochastic_sampling", False):
        raise MetadataError(
            f"{type(scheduler).__name__} came with a distilled transformer, whose steps add fresh noise to the clean "
            "latent: use omni_attn.models.wan.dmd.build_dmd_scheduler()."
        )
