"""Where captured steps lie: inputs and common metadata in buffers that keep their address, padded to a size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

import torch

from omni_attn.backends.buffers import BufferPool
from omni_attn.backends.paged import PAD_SLOT, CommonAttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.kv_cache.batches import BatchDescriptor, Commons, form_of
from omni_attn.kv_cache.graphs import map_tensors

Inputs = Mapping[str, torch.Tensor]
Axis = Literal["tokens", "requests"] | None


class StagedStep:
    """Copies a step to where graphs read it.

    Args:
        device: of the model.
        axes: see GraphRunner's input_axes.
        block_sizes: see GraphRunner.
    """

    def __init__(
        self, device: torch.device, axes: Mapping[str, Axis], block_sizes: Mapping[Any, int]
    ) -> None:
        self.device, self.buffers = device, BufferPool(device)
        self._axes, self._block_sizes = dict(axes), dict(block_sizes)

    def form(self, inputs: Inputs, commons: Commons) -> tuple[object, ...]:
        """What has to be equal for a step to lie where another one lay."""
        shapes = tuple(
            (name, x.dtype, x.shape if self._axes.get(name, "tokens") is None else x.shape[1:])
            for name, x in sorted(inputs.items())
        )
        return shapes, form_of(commons)

    def inputs(
        self, inputs: Inputs, batch: BatchDescriptor, size: BatchDescriptor
    ) -> dict[str, torch.Tensor]:
        """Inputs of a step, padded to a size.

        Raises:
            MetadataError: an input has not as many rows as the step.
        """
        static = {}
        for name, values in inputs.items():
            axis = self._axes.get(name, "tokens")
            rows, held = _rows(batch, axis), _rows(size, axis)
            if rows is not None and (values.dim() == 0 or values.shape[0] != rows):
                raise MetadataError(
                    f'input "{name}" has shape {list(values.shape)}, and the step has {rows} {axis}: the first '
                    "dimension counts them, or input_axes says what it counts"
                )
            static[name] = self.buffers.stage(f"input {name}", values, rows=held)
        return static

    def commons(self, commons: Commons, size: BatchDescriptor) -> dict[Any, CommonAttentionMetadata]:
        """Common metadata of a step, padded to a size and with its upper bounds."""
        places: dict[tuple[str, int], torch.Tensor] = {}  # what groups share is copied once
        staged = {}
        for group, common in commons.items():
            padded = common.padded(size.num_reqs, size.num_tokens)
            most = size.max_seq_len
            if (block_size := self._block_sizes.get(group)) is not None:
                most = min(most, common.block_table.shape[1] * block_size)
            changes: dict[str, Any] = {"max_query_len": size.max_query_len, "max_seq_len": most}
            for field in fields(common):
                values = getattr(padded, field.name)
                if not isinstance(values, torch.Tensor) or values.device.type != self.device.type:
                    continue
                shared = field.name, id(getattr(common, field.name))
                if shared not in places:
                    fill = PAD_SLOT if field.name == "slot_mapping" else 0
                    places[shared] = self.buffers.stage(f"{group}.{field.name}", values, fill=fill)
                changes[field.name] = places[shared]
            staged[group] = padded.replace(**changes)
        return staged


def without_padding(outputs: Any, batch: BatchDescriptor, size: BatchDescriptor, axis: Axis) -> Any:
    """Of a graph's outputs the rows that are of the batch; axis: what their first dimension counts."""
    rows = _rows(batch, axis)
    if rows is None or rows == _rows(size, axis):
        return outputs
    return map_tensors(lambda output: output[:rows], outputs)


def _rows(batch: BatchDescriptor, axis: Axis) -> int | None:
    return None if axis is None else batch.num_tokens if axis == "tokens" else batch.num_reqs
