"""How a request becomes one sequence: text alone (t2va), with keyframes (fl2va), or with references (ref2va).

Every packing is [text | conditions | target audio | target video]. Media time goes on where the text ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from omni_attn.config.names import nearest
from omni_attn.errors import ConfigError, MetadataError
from omni_attn.models.minimax_h3.positions import (
    FRAME_TIME,
    audio_positions,
    elapsed,
    spatial_axes,
    text_positions,
    video_positions,
)
from omni_attn.models.minimax_h3.sequence import (
    TEXT_TAG,
    VIDEO_TAG,
    Block,
    PackedSequence,
    RowKind,
    join_blocks,
)
from omni_attn.models.minimax_h3.sizes import LatentSize, Patch, token_grid

_PATCH = (1, 2, 2)
MAX_REFERENCES = 12
REFERENCE_LIMITS = {"image": 9, "video": 3, "audio": 3}


@dataclass(frozen=True)
class ImageReference:
    """A picture whose latents are (height, width) large. It takes one unit of time."""

    latent_size: tuple[int, int]


@dataclass(frozen=True)
class VideoReference:
    """A video of (latent frames, height, width), and the audio latents of each channel of its soundtrack, if any."""

    latent_size: LatentSize
    audio_latents: int = 0


@dataclass(frozen=True)
class AudioReference:
    """A sound of so many audio latents in each channel."""

    audio_latents: int


Reference: TypeAlias = ImageReference | VideoReference | AudioReference
_KINDS = {ImageReference: "image", VideoReference: "video", AudioReference: "audio"}


def pack_t2va(
    text_rows: int | Tensor, latent_size: LatentSize, audio_latents: int, *, patch_size: Patch = _PATCH
) -> PackedSequence:
    """The sequence of a video and its sound from text alone.

    Args:
        text_rows: how many rows the encoded text has, or the tag of each: int64 [rows], 1, and 0 for rows that the
            text encoder made of a picture.
        latent_size: frames, height and width of the target's latents (see `sizes.latent_size`).
        audio_latents: of each of its two channels.
        patch_size: latents that one row of video holds.

    Raises:
        MetadataError: sizes that are not positive or not filled by patches, unknown tags.
    """
    return _pack(text_rows, [], latent_size, audio_latents, patch_size)


def pack_fl2va(
    text_rows: int | Tensor,
    latent_size: LatentSize,
    audio_latents: int,
    *,
    first: bool = False,
    last: bool = False,
    patch_size: Patch = _PATCH,
) -> PackedSequence:
    """The sequence of a video that begins and / or ends with a given frame; arguments as for `pack_t2va`.

    Conditions are the first keyframe, then the last one, each as large as a frame of the target.

    Raises:
        MetadataError: neither keyframe, or as for `pack_t2va`.
    """
    if not (first or last):
        raise MetadataError(
            "fl2va without a keyframe: give the first or the last one, or pack with pack_t2va, which needs none."
        )
    token_grid(latent_size, patch_size)
    origin = float(_text_tags(text_rows).shape[0])
    times = [origin] * first + [origin + elapsed(latent_size[0]) - FRAME_TIME] * last
    frames = [_video(RowKind.CONDITION_VIDEO, (1, *latent_size[1:]), patch_size, time) for time in times]
    return _pack(text_rows, frames, latent_size, audio_latents, patch_size)


def pack_ref2va(
    text_rows: int | Tensor,
    latent_size: LatentSize,
    audio_latents: int,
    references: Sequence[Reference],
    *,
    patch_size: Patch = _PATCH,
) -> PackedSequence:
    """The sequence of a video after references, whose order counts; other arguments as for `pack_t2va`.

    Each reference follows the one before it in time, and the target follows them all. A video's soundtrack lies before
    it in the sequence, and beside it in time.

    Raises:
        MetadataError: no references, too many, sounds alone, or as for `pack_t2va`.
    """
    _check_references(references)
    token_grid(latent_size, patch_size)
    clock, blocks = float(_text_tags(text_rows).shape[0]), []
    target_columns = spatial_axes(latent_size[1:], patch_size[1:])[1]
    for reference in references:
        if isinstance(reference, AudioReference):
            blocks.append(_audio(RowKind.CONDITION_AUDIO, reference.audio_latents, target_columns, clock))
            clock += reference.audio_latents
        elif isinstance(reference, ImageReference):
            size = (1, *reference.latent_size)
            blocks.append(_video(RowKind.CONDITION_VIDEO, size, patch_size, clock))
            clock += 1
        else:
            video = _video(RowKind.CONDITION_VIDEO, reference.latent_size, patch_size, clock)
            columns = spatial_axes(reference.latent_size[1:], patch_size[1:])[1]
            blocks += [_audio(RowKind.CONDITION_AUDIO, reference.audio_latents, columns, clock), video]
            clock += max(reference.audio_latents, elapsed(reference.latent_size[0]))
    return _pack(text_rows, blocks, latent_size, audio_latents, patch_size, clock)


PACKINGS: dict[str, Callable[..., PackedSequence]] = {
    "t2va": pack_t2va,
    "fl2va": pack_fl2va,
    "ref2va": pack_ref2va,
}


def get_packing(name: str) -> Callable[..., PackedSequence]:
    """The function that packs in the way of this name.

    Raises:
        ConfigError: there is none; the text names those that are.
    """
    if name not in PACKINGS:
        guess = nearest(name, PACKINGS)
        hint = f"Did you mean {guess!r}? " if guess else ""
        raise ConfigError(f"unknown packing {name!r}. {hint}MiniMax-H3 packs {', '.join(PACKINGS)}.")
    return PACKINGS[name]


def _pack(
    text_rows: int | Tensor,
    conditions: Sequence[Block],
    size: LatentSize,
    audio_latents: int,
    patch: Patch,
    origin: float | None = None,
) -> PackedSequence:
    """The sequence of a text, conditions and a target that starts at `origin`, the end of the text if None."""
    tags, grid = _text_tags(text_rows), token_grid(size, patch)
    start = float(tags.shape[0]) if origin is None else origin
    text = Block(RowKind.TEXT, text_positions(tags.shape[0]), tags)
    audio = _audio(RowKind.TARGET_AUDIO, audio_latents, spatial_axes(size[1:], patch[1:])[1], start)
    video = _video(RowKind.TARGET_VIDEO, size, patch, start)
    return join_blocks([text, *conditions, audio, video], grid)


def _video(kind: RowKind, size: LatentSize, patch: Patch, origin: float) -> Block:
    if patch[0] != 1:
        raise MetadataError(
            f"patch_size is {patch}: MiniMax-H3 gives each latent frame its own time; the first must be 1."
        )
    token_grid(size, patch)
    return Block(kind, video_positions(size, patch[1:], origin))


def _audio(kind: RowKind, latents: int, columns: Tensor, origin: float) -> Block:
    if latents < 0:
        raise MetadataError(f"{latents} audio latents: needs 0 or more in each channel.")
    return Block(kind, audio_positions(latents, columns, origin))


def _text_tags(text_rows: int | Tensor) -> Tensor:
    """int64 [rows] on the host: the tags of the text rows."""
    if not isinstance(text_rows, Tensor):
        if isinstance(text_rows, bool) or not isinstance(text_rows, int) or text_rows < 1:
            raise MetadataError(
                f"text_rows is {text_rows!r}; needs how many rows the encoded text has, 1 or more, or a tensor with "
                "the tag of each."
            )
        return torch.full((text_rows,), TEXT_TAG, device="cpu")
    tags = text_rows.to("cpu", torch.int64)
    if tags.ndim != 1 or not tags.shape[0]:
        raise MetadataError(f"text tags have shape {list(tags.shape)}; needs [rows], at least one.")
    if unknown := sorted(set(tags.tolist()) - {TEXT_TAG, VIDEO_TAG}):
        raise MetadataError(
            f"text tags hold {unknown[0]}; needs {TEXT_TAG} (text) or {VIDEO_TAG} (a row made of a picture)."
        )
    return tags


def _check_references(references: Sequence[Reference]) -> None:
    for reference in references:
        if type(reference) not in _KINDS:
            known = ", ".join(kind.__name__ for kind in _KINDS)
            raise MetadataError(f"{reference!r} is no reference; give one of {known}.")
        if isinstance(reference, AudioReference) and reference.audio_latents < 1:
            raise MetadataError(f"{reference}: needs 1 audio latent or more in each channel.")
    counts = Counter(_KINDS[type(reference)] for reference in references)
    if not counts:
        raise MetadataError("ref2va without references: give one, or pack with pack_t2va, which needs none.")
    for kind, limit in REFERENCE_LIMITS.items():
        if counts[kind] > limit:
            raise MetadataError(f"{counts[kind]} {kind} references: MiniMax-H3 takes up to {limit}.")
    if counts.total() > MAX_REFERENCES:
        raise MetadataError(f"{counts.total()} references: MiniMax-H3 takes up to {MAX_REFERENCES}.")
    if set(counts) == {"audio"}:
        raise MetadataError(
            f"{counts['audio']} audio references alone: add an image or a video, which a sound can belong to."
        )
