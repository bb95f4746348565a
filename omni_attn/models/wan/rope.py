"""Rotary position embedding over frames, height and width.

Shape letters: B batch, S tokens, H heads, D head size; P = D / 2 channel pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from omni_attn.models.layers import multiply_add
from omni_attn.parallel.shards import Span

_THETA = 10000.0
_MAX_CACHED = 4  # a 720p grid holds about 80 MB; four cover a person who alternates between sizes


class RopeTable(NamedTuple):
    """What the first and the second channel of every pair contribute to the rotated pair.

    `first` holds (cos, sin) and `second` (-sin, cos), each [1, S, 1, P, 2] in float32.
    """

    first: Tensor
    second: Tensor


def rope_axis_dims(head_size: int) -> tuple[int, int, int]:
    """How many channels of a head turn with the frame, the row and the column: 44, 42, 42 of 128."""
    spatial = 2 * (head_size // 6)
    return head_size - 2 * spatial, spatial, spatial


def build_rope_table(
    head_size: int, grid: tuple[int, int, int], device: torch.device, first_frame: int = 0
) -> RopeTable:
    """The table of every token of a (frames, height, width) grid in raster order, width fastest.

    A grid that is a part of a longer video begins at its `first_frame`.

    On an axis of m channels pair i turns by `position * 10000 ** (-2 i / m)`. Angles are computed in float64
    on the CPU, since not every device has it, and stored as float32.
    """
    angles = []
    for axis, (length, dim) in enumerate(zip(grid, rope_axis_dims(head_size), strict=True)):
        frequency = _THETA ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
        position = torch.arange(length, dtype=torch.float64, device="cpu")
        angle = torch.outer(position + first_frame if axis == 0 else position, frequency)
        shape = [1, 1, 1, dim // 2]
        shape[axis] = length
        angles.append((angle.view(shape), (*grid, dim // 2)))

    def over_grid(function: Callable[[Tensor], Tensor]) -> Tensor:
        parts = [function(angle).float().to(device).expand(shape) for angle, shape in angles]
        return torch.cat(parts, dim=-1).view(1, -1, 1, head_size // 2)

    cos, sin = over_grid(torch.cos), over_grid(torch.sin)
    return RopeTable(torch.stack([cos, sin], dim=-1), torch.stack([-sin, cos], dim=-1))


class RopeCache:
    """Tables of the last few grids. They depend on nothing else, so a denoising loop builds one."""

    def __init__(self, head_size: int) -> None:
        self._head_size = head_size
        self._tables: dict[tuple[tuple[int, int, int], torch.device, int, Span | None], RopeTable] = {}

    def get(
        self,
        grid: tuple[int, int, int],
        device: torch.device,
        first_frame: int = 0,
        span: Span | None = None,
    ) -> RopeTable:
        """See build_rope_table; with a span only its tokens."""
        key = (grid, device, first_frame, span)
        if key not in self._tables:
            if len(self._tables) == _MAX_CACHED:
                del self._tables[next(iter(self._tables))]
            # A table made inside inference mode could not take part in a later training step.
            with torch.inference_mode(False):
                table = build_rope_table(self._head_size, grid, device, first_frame)
                if span is not None:  # a copy, so that the rest is not kept
                    table = RopeTable(*(part[:, span[0] : span[1]].clone() for part in table))
                self._tables[key] = table
        return self._tables[key]


def apply_rope(input_BSHD: Tensor, table: RopeTable) -> Tensor:
    """Channels 2i and 2i + 1 rotated together, in float32: (x0 cos - x1 sin, x0 sin + x1 cos)."""
    pairs = input_BSHD.reshape(*input_BSHD.shape[:-1], input_BSHD.shape[-1] // 2, 2)
    first, second = pairs[..., :1], pairs[..., 1:]
    return multiply_add(first * table.first, second, table.second, input_BSHD.dtype).flatten(-2)
