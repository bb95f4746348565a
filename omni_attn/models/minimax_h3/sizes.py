"""Sizes of a MiniMax-H3 request: what its VAEs can code, and what the released model was made for. No torch here.

The video VAE codes 17 frames as 5 latent frames and the last 5 frames as 2, and 16 x 16 pixels as one; the transformer
joins 2 x 2 of those. The audio VAE gives 40 latents a second for each of two channels.
"""

from __future__ import annotations

from omni_attn.errors import ConfigError, MetadataError

FRAMES_PER_SECOND = 24
AUDIO_LATENTS_PER_SECOND = 40
AUDIO_CHANNELS = 2
VAE_SPATIAL = 16
SIZE_MULTIPLE = 32  # of height and width: the VAE's 16 times the patch of 2

SHORT_EDGE = 768
MAX_PIXELS = 768 * 1344
MIN_SECONDS, MAX_SECONDS = 5, 15
MAX_ASPECT = 4  # 1:4 to 4:1

_CHUNK_FRAMES, _CHUNK_LATENTS = 17, 5
_TAIL_FRAMES, _TAIL_LATENTS = 5, 2

LatentSize = tuple[int, int, int]  # latent frames, height and width, before patches are cut
Patch = tuple[int, int, int]  # what a row of video covers of those


def latent_size(num_frames: int, height: int, width: int) -> LatentSize:
    """Latent frames, height and width of a video: 124 frames of 768 x 1344 are (37, 48, 84).

    Raises:
        ConfigError: the VAE cannot code that many frames or pixels; all problems at once, with the nearest sizes.
    """
    problems = size_problems(num_frames, height, width)
    if problems:
        raise ConfigError(*problems)
    chunks = (num_frames - _TAIL_FRAMES) // _CHUNK_FRAMES
    return chunks * _CHUNK_LATENTS + _TAIL_LATENTS, height // VAE_SPATIAL, width // VAE_SPATIAL


def token_grid(size: LatentSize, patch: Patch) -> tuple[int, int, int]:
    """Rows of a video on each axis.

    Raises:
        MetadataError: an axis is no multiple of the patch.
    """
    if len(size) != 3:
        raise MetadataError(f"latents of {' x '.join(map(str, size))}: needs frames, height and width.")
    for name, length, extent in zip(("frames", "height", "width"), size, patch, strict=True):
        if length < extent or length % extent:
            raise MetadataError(
                f"latents of {' x '.join(map(str, size))}: {name} is {length}, which patches of {extent} do not fill. "
                f"Use {max(extent, length // extent * extent)}."
            )
    return size[0] // patch[0], size[1] // patch[1], size[2] // patch[2]


def audio_latents(num_frames: int) -> int:
    """Audio latents of each channel beside that many frames: 207 beside 124."""
    return round(num_frames / FRAMES_PER_SECOND * AUDIO_LATENTS_PER_SECOND)


def size_problems(num_frames: int, height: int, width: int) -> list[str]:
    """Why the VAE cannot code this size, each problem with the nearest sizes that it can; empty if it can."""
    problems = []
    if num_frames < _TAIL_FRAMES or (num_frames - _TAIL_FRAMES) % _CHUNK_FRAMES:
        near = _nearest(num_frames, _CHUNK_FRAMES, _TAIL_FRAMES)
        problems.append(f"num_frames is {num_frames}, and the video VAE codes 17 * n + 5 frames: use {near}.")
    for name, value in (("height", height), ("width", width)):
        if value < SIZE_MULTIPLE or value % SIZE_MULTIPLE:
            near = _nearest(value, SIZE_MULTIPLE, SIZE_MULTIPLE)
            problems.append(f"{name} is {value}, and it must be a multiple of {SIZE_MULTIPLE}: use {near}.")
    return problems


def untrained_sizes(num_frames: int, height: int, width: int) -> list[str]:
    """What about a size lies outside what the released model was made for, one sentence each."""
    notes = []
    seconds = num_frames / FRAMES_PER_SECOND
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        notes.append(
            f"{num_frames} frames are {seconds:.1f} seconds, and the released model makes {MIN_SECONDS} to "
            f"{MAX_SECONDS}"
        )
    if max(height, width) > MAX_ASPECT * min(height, width):
        notes.append(
            f"{height} x {width} is narrower than 1:{MAX_ASPECT}, and the released model goes no further"
        )
        return notes
    canvas = canvas_size(height, width)
    if abs(canvas[0] - height) > SIZE_MULTIPLE or abs(canvas[1] - width) > SIZE_MULTIPLE:
        notes.append(
            f"{height} x {width} pixels, and the released model makes {canvas[0]} x {canvas[1]} of this shape"
        )
    return notes


def canvas_size(height: float, width: float) -> tuple[int, int]:
    """Height and width that the released model makes of a shape: short edge 768, at most 768 * 1344 pixels, rounded.

    Args:
        height, width: any size of that shape, for example of a first keyframe.

    Raises:
        ConfigError: the shape is narrower than 1:4, or not positive.
    """
    if min(height, width) <= 0 or max(height, width) > MAX_ASPECT * min(height, width):
        raise ConfigError(
            f"a picture of {height} x {width}: MiniMax-H3 makes shapes between 1:{MAX_ASPECT} and {MAX_ASPECT}:1. Crop "
            "it, or state height and width."
        )
    scale = SHORT_EDGE / min(height, width)
    scale = min(scale, (MAX_PIXELS / (height * width)) ** 0.5)
    rounded = [max(1, round(edge * scale / SIZE_MULTIPLE)) * SIZE_MULTIPLE for edge in (height, width)]
    return rounded[0], rounded[1]


def _nearest(value: int, step: int, first: int) -> str:
    """The members of first, first + step, ... on both sides of a value, as text."""
    below = first + (value - first) // step * step
    return str(first) if below < first else f"{below} or {below + step}"
