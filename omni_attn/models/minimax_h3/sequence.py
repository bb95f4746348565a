"""The packed sequence of MiniMax-H3: which row is what, where it lies in time and space, and at which noise level.

Shape letters: S rows of the sequence, padding included; M distinct noise levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from omni_attn.backends.metadata import VideoLayout
from omni_attn.errors import MetadataError

# Anchors were trained very slightly noised, and held there at every step; soundtracks of references were not.
CONDITION_VIDEO_TIME = 0.999
CONDITION_AUDIO_TIME = 1.0

VIDEO_TAG, TEXT_TAG, AUDIO_TAG, PADDING_TAG = 0, 1, 2, -1


class RowKind(IntEnum):
    """What a row of the sequence is."""

    TEXT = 0
    CONDITION_VIDEO = 1
    CONDITION_AUDIO = 2
    TARGET_AUDIO = 3
    TARGET_VIDEO = 4
    PADDING = 5


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one kind, with their positions [rows, 3] and, for text, their tags [rows]."""

    kind: RowKind
    positions: Tensor
    tags: Tensor | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedSequence:
    """Rows in the order [text | conditions | target audio | target video | padding]; names are those of the model.

    Attributes:
        grid: token grid of the target video.
        segments: rows of text, of conditions and of audio before the target video. Neighbouring conditions of one
            modality are one segment, as are reference soundtracks right before the target's.
        rows: rows in use.
        kinds: int64 [S], RowKind of each row.
        token_tags: int64 [S]: 0 video, 1 text, 2 audio, -1 padding. Rows of a text's pictures may have tag 0.
        position_ids: [S, 3] rotary (t, h, w): float64, which `to` makes float32 for another device than the CPU.
        video_indices, audio_indices, text_indices: int64: where rows of these lie, conditions first.
        condition_video_rows, condition_audio_rows: how many of the first two are conditions.
    """

    grid: tuple[int, int, int]
    segments: tuple[int, ...]
    rows: int
    kinds: Tensor
    token_tags: Tensor
    position_ids: Tensor
    video_indices: Tensor
    audio_indices: Tensor
    text_indices: Tensor
    condition_video_rows: int
    condition_audio_rows: int

    @property
    def target_video(self) -> slice:
        """Which of the video rows are generated."""
        return slice(self.condition_video_rows, None)

    @property
    def target_audio(self) -> slice:
        """Which of the audio rows are generated."""
        return slice(self.condition_audio_rows, None)

    @property
    def padded_len(self) -> int | None:
        """Rows with padding; None where there is none."""
        length = self.token_tags.shape[0]
        return None if length == self.rows else length

    @property
    def layout(self) -> VideoLayout:
        """The sequence as an attention record states it: segments, then the target video."""
        return VideoLayout(prefix_segments=self.segments, spans=(self.grid,), used_len=self.rows)

    def padded(self, multiple: int = 64) -> PackedSequence:
        """The same with padding rows up to a multiple, as native packing has it: a document of their own.

        Raises:
            MetadataError: `multiple` is not positive.
        """
        if multiple < 1:
            raise MetadataError(f"padding to a multiple of {multiple}: needs a positive number, such as 64.")
        device, extra = self.token_tags.device, -self.rows % multiple
        positions = self.position_ids[: self.rows]
        return replace(
            self,
            kinds=_extended(self.kinds[: self.rows], extra, RowKind.PADDING),
            token_tags=_extended(self.token_tags[: self.rows], extra, PADDING_TAG),
            position_ids=torch.cat([positions, torch.zeros(extra, 3, dtype=positions.dtype, device=device)]),
        )

    def to(self, device: torch.device | str) -> PackedSequence:
        """The same on a device. The model rotates in float32, so that float64 need not leave the host."""
        device = torch.device(device)
        positions = self.position_ids if device.type == "cpu" else self.position_ids.float()
        return replace(
            self,
            position_ids=positions.to(device),
            **{
                name: getattr(self, name).to(device)
                for name in ("kinds", "token_tags", "video_indices", "audio_indices", "text_indices")
            },
        )

    def timesteps(self, video_time: float, audio_time: float) -> tuple[Tensor, Tensor]:
        """Distinct noise levels, and which of them each row has.

        Text and padding have the video's. Condition video has 0.999, or the video's where that is cleaner; condition
        audio is clean.

        Args:
            video_time, audio_time: t of the targets, 0 = noise to 1 = clean.

        Returns:
            `timestep` [M] float32, ascending, and `timestep_indices` [S] int64, on the sequence's device.

        Raises:
            MetadataError: a time outside 0 to 1.
        """
        for name, time in (("video_time", video_time), ("audio_time", audio_time)):
            if not 0 <= time <= 1:
                raise MetadataError(f"{name} is {time}; needs 0 (noise) to 1 (clean).")
        of_kind = {
            RowKind.TEXT: video_time,
            RowKind.CONDITION_VIDEO: max(video_time, CONDITION_VIDEO_TIME),
            RowKind.CONDITION_AUDIO: CONDITION_AUDIO_TIME,
            RowKind.TARGET_AUDIO: audio_time,
            RowKind.TARGET_VIDEO: video_time,
            RowKind.PADDING: video_time,
        }
        present = self._present_kinds
        times = torch.tensor([of_kind[kind] for kind in present], dtype=torch.float32, device="cpu")
        timestep, inverse = torch.unique(times, sorted=True, return_inverse=True)
        level_of_kind = torch.zeros(len(RowKind), dtype=torch.int64, device="cpu")
        level_of_kind[list(present)] = inverse
        device = self.kinds.device
        return timestep.to(device), level_of_kind.to(device)[self.kinds]

    @cached_property
    def _present_kinds(self) -> tuple[RowKind, ...]:
        """Kinds with a row, found out without a look at the device."""
        counts = {
            RowKind.TEXT: self.text_indices.shape[0],
            RowKind.CONDITION_VIDEO: self.condition_video_rows,
            RowKind.CONDITION_AUDIO: self.condition_audio_rows,
            RowKind.TARGET_AUDIO: self.audio_indices.shape[0] - self.condition_audio_rows,
            RowKind.TARGET_VIDEO: self.video_indices.shape[0] - self.condition_video_rows,
            RowKind.PADDING: self.token_tags.shape[0] - self.rows,
        }
        return tuple(kind for kind, count in counts.items() if count)


_TAGS = {
    RowKind.TEXT: TEXT_TAG,
    RowKind.CONDITION_VIDEO: VIDEO_TAG,
    RowKind.CONDITION_AUDIO: AUDIO_TAG,
    RowKind.TARGET_AUDIO: AUDIO_TAG,
    RowKind.TARGET_VIDEO: VIDEO_TAG,
}
_VIDEO = (RowKind.CONDITION_VIDEO, RowKind.TARGET_VIDEO)
_AUDIO = (RowKind.CONDITION_AUDIO, RowKind.TARGET_AUDIO)


def join_blocks(blocks: Sequence[Block], grid: tuple[int, int, int]) -> PackedSequence:
    """The sequence of these blocks, of which the last is the target video of this grid."""
    counts = [block.positions.shape[0] for block in blocks]
    kinds = torch.tensor([block.kind for block in blocks], device="cpu").repeat_interleave(
        torch.tensor(counts, device="cpu")
    )
    tags = [
        torch.full((count,), _TAGS[block.kind], device="cpu") if block.tags is None else block.tags
        for block, count in zip(blocks, counts, strict=True)
    ]
    before = [
        (count, "text" if block.kind is RowKind.TEXT else "audio" if block.kind in _AUDIO else "video")
        for block, count in zip(blocks[:-1], counts[:-1], strict=True)
        if count
    ]

    def rows_of(*wanted: RowKind) -> Tensor:
        return torch.isin(kinds, torch.tensor(wanted, device="cpu")).nonzero().flatten()

    return PackedSequence(
        grid=grid,
        segments=tuple(
            sum(count for count, _ in run) for _, run in groupby(before, key=lambda counted: counted[1])
        ),
        rows=sum(counts),
        kinds=kinds,
        token_tags=torch.cat(tags),
        position_ids=torch.cat([block.positions for block in blocks]),
        video_indices=rows_of(*_VIDEO),
        audio_indices=rows_of(*_AUDIO),
        text_indices=rows_of(RowKind.TEXT),
        condition_video_rows=sum(c for c, b in zip(counts, blocks, strict=True) if b.kind is _VIDEO[0]),
        condition_audio_rows=sum(c for c, b in zip(counts, blocks, strict=True) if b.kind is _AUDIO[0]),
    )


def _extended(values: Tensor, extra: int, filler: int) -> Tensor:
    return torch.cat([values, values.new_full((extra,), filler)])
