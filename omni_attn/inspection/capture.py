"""The tensors of one attention call of a pipeline, caught while it denoises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.config import PipelineConfig
from omni_attn.errors import ConfigError
from omni_attn.inspection.target import Target, layers_of
from omni_attn.layer import Attention
from omni_attn.models import get_family
from omni_attn.models.runtime import Progress, no_progress

_ARGUMENTS = ("query", "key", "value", "metadata")  # of Attention.forward


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedCall:
    """One call of a layer.

    Attributes:
        target: what was asked for.
        layer: ran it, and can run it again; name: the layer's in the model.
        query, key, value: [B, Sq, H, D], [B, Sk, G, D] and [B, Sk, G, Dv].
        record: the step's record, with the tensors that are the layer's own (`gate_compress`).
        output: [B, Sq, H, Dv], what the layer gave.
    """

    target: Target
    layer: Attention
    name: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    record: AttentionMetadata
    output: torch.Tensor


class _Caught(Exception):
    """Ends the loop: nobody needs the rest of the video."""

    def __init__(self, call: CapturedCall) -> None:
        super().__init__("caught")
        self.call = call


class _Watch:
    """Catches the target's first call: with guidance, the one with the prompt."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.steps_seen = 0

    def hook(self, name: str) -> Any:
        """A forward hook for the layer of this name."""

        def look(
            layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor
        ) -> None:
            call = dict(zip(_ARGUMENTS, given, strict=False)) | named
            record = call.get("metadata")
            if record is None:
                return
            self.steps_seen = record.num_steps or self.steps_seen
            if record.step != self.target.step:
                return
            assert isinstance(layer, Attention)
            raise _Caught(
                CapturedCall(
                    target=self.target,
                    layer=layer,
                    name=name,
                    query=call["query"],
                    key=call["key"],
                    value=call["value"],
                    record=record,
                    output=output,
                )
            )

        return look


def capture(
    config: PipelineConfig, target: Target, *, progress: Progress = no_progress
) -> tuple[CapturedCall, tuple[str, ...]]:
    """Runs a pipeline up to a call: the call, and notes of what was filled in. The weights are released again.

    Raises:
        ConfigError: there is no such layer or step; and what preparing the pipeline raises.
    """
    ready = get_family(config.pipeline).prepare(config, progress=progress)
    watch = _Watch(target)
    handles = [
        layer.register_forward_hook(watch.hook(name), with_kwargs=True)
        for name, layer in layers_of(ready.model, target).items()
    ]
    try:
        ready.denoise(progress=progress)
    except _Caught as caught:
        return caught.call, ready.notes
    finally:
        for handle in handles:
            handle.remove()
    if not watch.steps_seen:
        raise ConfigError(
            f"--role {target.role}: its layers ran outside of the denoising steps (no record stated one), so there "
            "is no step to look at. Choose another role."
        )
    raise ConfigError(
        f"--step {target.step}: this model's sampler makes {watch.steps_seen} steps, numbered from 0 to "
        f"{watch.steps_seen - 1}. Choose one of these."
    )
