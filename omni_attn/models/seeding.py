"""What is drawn from one seed: noise, weights, stand-ins for prompts and pictures, each by a generator of its own."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

import torch
from torch import Tensor, nn

from omni_attn.models.checkpoint import resolve_float
from omni_attn.models.runtime import Progress, no_progress

Model = TypeVar("Model", bound=nn.Module)


class Stream(IntEnum):
    """Things that are drawn from one seed, each by a generator of its own. The noise is drawn as diffusers does."""

    NOISE = 0
    WEIGHTS = 1
    WEIGHTS_2 = 2
    PROMPT = 3
    IMAGE = 4
    LAST_IMAGE = 5


def seeded_generator(seed: int, stream: Stream, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator whose draws depend on seed and stream; streams of nearby seeds do not meet."""
    return torch.Generator(device).manual_seed((seed + (stream << 40)) % 2**64)


def fill_weights(
    model: Model,
    device: torch.device,
    dtype: str,
    keeps_float32: Callable[[str], bool],
    fill: Callable[[Tensor, str], Tensor],
    progress: Progress = no_progress,
) -> Model:
    """The model, built on the meta device, with weights on a device; for inference.

    Every weight is made in its final dtype, one at a time, so that the peak is about the model itself.

    Args:
        model: has parameters and no stored buffers.
        device: where the weights are made.
        dtype: name of that of all weights but those that stay in float32.
        keeps_float32: whether the parameter of this name is float32 in any case.
        fill: fills the weight of a name, which holds anything, in place, and gives it back.
        progress: is given the parameters.
    """
    target = resolve_float(dtype)
    weights = {}
    named = list(model.named_parameters())
    for name, parameter in progress(named, len(named), "seeding weights"):
        own_dtype = torch.float32 if keeps_float32(name) else target
        weights[name] = fill(torch.empty(parameter.shape, dtype=own_dtype, device=device), name)
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def seeded_weights_note(seed: int) -> str:
    """Told with every result of a preset."""
    return f"weights: seeded (seed {seed}) and untrained, so the frames show colour fields and no subject"
