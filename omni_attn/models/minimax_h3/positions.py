"""Rotary coordinates (t, h, w) of the rows of a packed sequence, in float64 on the host.

One unit of time is one audio latent, or 3 / 5 of a video frame. Spatial coordinates depend on the shape alone: an axis
is centred on 16 and as long as its share of the square root of the area, times 32.

Shape letters: N rows, F latent frames.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from omni_attn.models.minimax_h3.sizes import AUDIO_CHANNELS, LatentSize

FRAME_TIME = 5 / 3  # of one video frame: 40 audio latents a second, 24 frames a second
_SCALE = 32
# The VAE's latent frames stand for 1, 4, 4, 4 and 4 frames, over and over.
_FRAMES_BEFORE, _FRAMES_PER_CYCLE = (0, 1, 5, 9, 13), 17


def elapsed(latent_frames: int) -> float:
    """Time that the first so many latent frames of a video take: 620 / 3 for 37."""
    cycles, rest = divmod(latent_frames, len(_FRAMES_BEFORE))
    return 5 * (cycles * _FRAMES_PER_CYCLE + _FRAMES_BEFORE[rest]) / 3


def text_positions(rows: int) -> Tensor:
    """[N, 3]: row r at (r, 0, 0)."""
    positions = torch.zeros(rows, 3, dtype=torch.float64, device="cpu")
    positions[:, 0] = torch.arange(rows, device="cpu")
    return positions


def video_positions(size: LatentSize, patch: tuple[int, int], origin: float) -> Tensor:
    """[N, 3] of a video that starts at `origin`, in raster order, width fastest."""
    frames, height, width = size
    times = [origin + elapsed(frame) for frame in range(frames)]
    rows, columns = spatial_axes((height, width), patch)
    axes = (torch.tensor(times, dtype=torch.float64, device="cpu"), rows, columns)
    return torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=-1)


def audio_positions(latents: int, columns: Tensor, origin: float) -> Tensor:
    """[N, 3] of two channels one after the other: the first at the left edge of a video, the second at its right.

    Args:
        latents: of each channel.
        columns: the width axis of that video.
        origin: time of the first latent.
    """
    positions = torch.zeros(AUDIO_CHANNELS, latents, 3, dtype=torch.float64, device="cpu")
    positions[:, :, 0] = origin + torch.arange(latents, dtype=torch.float64, device="cpu")
    positions[:, :, 2] = columns[[0, -1], None]
    return positions.flatten(0, 1)


def spatial_axes(size: tuple[int, int], patch: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Coordinates of the rows of patches and of the columns, for latents of (height, width)."""
    root = sqrt(size[0] * size[1])
    return _axis(size[0], patch[0], root), _axis(size[1], patch[1], root)


def _axis(length: int, patch: int, root: float) -> Tensor:
    share, points = length / root, length // patch
    start = (1 - share) / 2
    step = (start + share - start) / points  # as numpy's linspace rounds it
    return (torch.arange(points, dtype=torch.float64, device="cpu") * step + start) * _SCALE
