"""Packed sequences against diffusers' own layouts, published row counts, and what a sequence has to add up to."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import before_denoise as reference
from hypothesis import given
from hypothesis import strategies as st

from omni_attn.errors import ConfigError, MetadataError
from omni_attn.models.minimax_h3.packing import (
    AudioReference,
    ImageReference,
    Reference,
    VideoReference,
    get_packing,
    pack_fl2va,
    pack_ref2va,
    pack_t2va,
)
from omni_attn.models.minimax_h3.sequence import PackedSequence, RowKind
from omni_attn.models.minimax_h3.sizes import audio_latents, latent_size
from omni_attn.ops.video_tiles import chunk_sizes, tile_sizes

PATCH = (1, 2, 2)
even = st.integers(1, 5).map(lambda half: 2 * half)
latents = st.tuples(st.integers(1, 12), even, even)
audio = st.integers(0, 7)
texts = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=9).map(torch.tensor)
times = st.floats(0, 1, width=32)
pictures: st.SearchStrategy[Reference] = st.builds(ImageReference, st.tuples(even, even))
videos: st.SearchStrategy[Reference] = st.builds(VideoReference, latents, audio)
sounds: st.SearchStrategy[Reference] = st.builds(AudioReference, st.integers(1, 7))
references = st.lists(pictures | videos | sounds, min_size=1, max_size=5).filter(
    lambda chosen: (
        any(not isinstance(one, AudioReference) for one in chosen)
        and all(sum(type(one) is kind for one in chosen) <= 3 for kind in (VideoReference, AudioReference))
    )
)
NUMBERS = (PATCH, 2, 2, 0)  # patch, audio channels, audio tag, video tag, as diffusers hands them over


def check_against_diffusers(found: PackedSequence, layout: tuple[object, ...]) -> None:
    positions, tags, *indices, video_conditions, audio_conditions = layout
    assert isinstance(positions, torch.Tensor) and isinstance(tags, torch.Tensor)
    torch.testing.assert_close(found.position_ids, positions, atol=1e-11, rtol=0)
    assert torch.equal(found.position_ids.float(), positions.float())
    assert torch.equal(found.token_tags, tags)
    for ours, theirs in zip(
        (found.video_indices, found.audio_indices, found.text_indices), indices, strict=True
    ):
        assert isinstance(theirs, torch.Tensor) and torch.equal(ours, theirs)
    assert (found.condition_video_rows, found.condition_audio_rows) == (video_conditions, audio_conditions)


def check_sums(found: PackedSequence, size: tuple[int, int, int], sound: int) -> None:
    every = torch.cat([found.video_indices, found.audio_indices, found.text_indices])
    assert torch.equal(every.sort().values, torch.arange(found.rows))
    layout = found.layout
    assert layout.used_len == found.rows and layout.spans == (found.grid,)
    assert found.grid == (size[0], size[1] // 2, size[2] // 2)
    start = sum(found.segments)
    assert torch.equal(found.video_indices[found.target_video], torch.arange(start, found.rows))
    assert torch.equal(found.audio_indices[found.target_audio], torch.arange(start - 2 * sound, start))
    # A segment holds rows of one modality, and its neighbours hold others.
    ends = torch.tensor(found.segments).cumsum(0).tolist()
    family = torch.tensor([0, 1, 2, 2, 1, 3])[found.kinds]
    runs = torch.unique_consecutive(family[:start], return_counts=True)[1].cumsum(0).tolist()
    assert ends == runs


@pytest.mark.parametrize(
    ("frames", "rows", "video_rows", "audio_rows"),
    [(124, 37740, 37296, 414), (243, 73416, 72576, 810), (345, 103996, 102816, 1150)],
)
def test_published_row_counts(frames: int, rows: int, video_rows: int, audio_rows: int) -> None:
    found = pack_t2va(30, latent_size(frames, 768, 1344), audio_latents(frames))
    assert (found.rows, len(found.video_indices), len(found.audio_indices)) == (rows, video_rows, audio_rows)
    assert found.segments == (30, audio_rows)
    assert prod(found.grid) == video_rows


def test_published_row_count_of_2k() -> None:
    assert pack_t2va(30, latent_size(124, 1440, 2560), audio_latents(124)).rows == 133644


def test_tiles_of_a_whole_layout() -> None:
    layout = pack_t2va(300, latent_size(124, 768, 1344), audio_latents(124)).layout
    sizes = tile_sizes(layout.spans[-1], (4, 4, 4))
    assert len(chunk_sizes(layout.prefix_segments, (4, 4, 4))) == 12
    assert (len(sizes), min(sizes)) == (660, 8)


@given(texts, latents, audio, st.booleans(), st.booleans())
def test_text_and_keyframes_are_laid_out_as_in_diffusers(
    tags: torch.Tensor, size: tuple[int, int, int], sound: int, first: bool, last: bool
) -> None:
    anchors = ("first",) * first + ("last",) * last
    wanted = reference.MiniMaxH3PrepareLayoutStep.build_packed_sequence(tags, *size, sound, *NUMBERS, anchors)
    packed = pack_fl2va(tags, size, sound, first=first, last=last) if anchors else None
    found = packed or pack_t2va(tags, size, sound)
    check_against_diffusers(found, wanted)
    check_sums(found, size, sound)
    frame = size[1] * size[2] // 4
    assert found.segments == tuple(filter(None, (len(tags), len(anchors) * frame, 2 * sound)))


@given(texts, latents, audio, references)
def test_references_are_laid_out_as_in_diffusers(
    tags: torch.Tensor, size: tuple[int, int, int], sound: int, chosen: list[Reference]
) -> None:
    kinds, pictures, sounds = [], [], []
    for one in chosen:
        if isinstance(one, ImageReference):
            kinds.append(SimpleNamespace(kind="image", has_audio=False))
            pictures.append(torch.empty(1, 1, 1, *one.latent_size))
        elif isinstance(one, VideoReference):
            kinds.append(SimpleNamespace(kind="video", has_audio=one.audio_latents > 0))
            pictures.append(torch.empty(1, 1, *one.latent_size))
        else:
            kinds.append(SimpleNamespace(kind="audio", has_audio=True))
        if kinds[-1].has_audio:
            assert isinstance(one, VideoReference | AudioReference)
            sounds.append(torch.empty(2 * one.audio_latents, 1))
    wanted = reference.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        tags, kinds, pictures, sounds, *size, sound, *NUMBERS
    )
    found = pack_ref2va(tags, size, sound, chosen)
    check_against_diffusers(found, wanted)
    check_sums(found, size, sound)


def test_conditions_of_one_modality_side_by_side_are_one_segment() -> None:
    pictures = [ImageReference((4, 4)), ImageReference((2, 4))]
    found = pack_ref2va(5, (3, 4, 4), 6, [*pictures, AudioReference(2), AudioReference(1)])
    assert found.segments == (5, 4 + 2, 2 * (2 + 1 + 6))
    found = pack_ref2va(5, (3, 4, 4), 6, [pictures[0], VideoReference((2, 4, 4), 3), pictures[1]])
    assert found.segments == (5, 4, 6, 8 + 2, 12)


@given(texts, latents, audio, st.booleans(), times, times)
def test_noise_levels_are_those_of_diffusers(
    tags: torch.Tensor,
    size: tuple[int, int, int],
    sound: int,
    anchored: bool,
    video_time: float,
    audio_time: float,
) -> None:
    found = pack_fl2va(tags, size, sound, first=True) if anchored else pack_t2va(tags, size, sound)
    wanted = reference.MiniMaxH3SetTimestepsStep.build_row_timesteps(
        found.video_indices,
        found.audio_indices,
        found.condition_video_rows,
        found.condition_audio_rows,
        len(tags),
        video_time,
        audio_time,
        max(video_time, 0.999),
        1.0,
    )
    for ours, theirs in zip(found.timesteps(video_time, audio_time), wanted, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_noise_levels_of_references() -> None:
    chosen = [ImageReference((2, 2)), AudioReference(1)]
    found = pack_ref2va(1, (2, 2, 2), 1, chosen)
    timestep, indices = found.timesteps(0.25, 0.5)
    assert timestep[indices].tolist() == pytest.approx([0.25, 0.999, 1, 1, 0.5, 0.5, 0.25, 0.25])
    assert timestep.tolist() == pytest.approx([0.25, 0.5, 0.999, 1])
    assert found.timesteps(1.0, 1.0)[0].tolist() == [1.0]


@given(latents, st.integers(1, 70))
def test_padding_is_behind_and_changes_nothing_before_it(size: tuple[int, int, int], multiple: int) -> None:
    plain = pack_t2va(3, size, 2)
    padded = plain.padded(multiple)
    length = len(padded.token_tags)
    assert length % multiple == 0 and 0 <= length - plain.rows < multiple
    assert padded.padded_len == (length if length > plain.rows else None)
    assert padded.layout == plain.layout
    for name in ("kinds", "token_tags", "position_ids"):
        assert torch.equal(getattr(padded, name)[: plain.rows], getattr(plain, name))
    assert (padded.token_tags[plain.rows :] == -1).all()
    assert (padded.kinds[plain.rows :] == RowKind.PADDING).all()
    assert not padded.position_ids[plain.rows :].any()
    timestep, indices = padded.timesteps(0.5, 0.25)
    assert len(indices) == length and torch.equal(timestep, plain.timesteps(0.5, 0.25)[0])
    again = padded.padded(1)
    assert again.padded_len is None and torch.equal(again.position_ids, plain.position_ids)


def test_another_device_gets_positions_in_float32() -> None:
    found = pack_t2va(3, (2, 4, 4), 2).padded()
    there = found.to("meta")
    tensors = (there.kinds, there.token_tags, there.position_ids, there.video_indices, there.text_indices)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert there.position_ids.dtype == torch.float32
    timestep, indices = there.timesteps(0.5, 0.25)
    assert (timestep.shape, indices.shape) == ((2,), (64,))
    assert found.to("cpu").position_ids.dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pack_t2va(0, (2, 4, 4), 2), "text_rows is 0"),
        (lambda: pack_t2va(3.0, (2, 4, 4), 2), "text_rows is 3.0; needs how many"),  # type: ignore[arg-type]
        (lambda: pack_t2va(True, (2, 4, 4), 2), "text_rows is True"),
        (lambda: pack_ref2va(3, (2, 4, 4), 2, [(4, 4)]), r"\(4, 4\) is no reference; .*ImageReference"),  # type: ignore[list-item]
        (
            lambda: pack_ref2va(3, (2, 4, 4), 2, [ImageReference((2, 2)), AudioReference(0)]),
            "1 audio latent or more",
        ),
        (lambda: pack_t2va(torch.tensor([1, 2]), (2, 4, 4), 2), "text tags hold 2; needs 1"),
        (lambda: pack_t2va(torch.ones(1, 4), (2, 4, 4), 2), r"shape \[1, 4\]; needs \[rows\]"),
        (lambda: pack_t2va(3, (2, 5, 4), 2), "height is 5, which patches of 2 do not fill. Use 4"),
        (lambda: pack_t2va(3, (0, 4, 4), 2), "frames is 0"),
        (lambda: pack_t2va(3, (2, 4, 4), -1), "-1 audio latents"),
        (lambda: pack_t2va(3, (2, 4, 4), 2, patch_size=(2, 2, 2)), r"\(2, 2, 2\).*first must be 1"),
        (lambda: pack_fl2va(3, (2, 4, 4), 2), "without a keyframe.*pack_t2va"),
        (lambda: pack_ref2va(3, (2, 4, 4), 2, []), "without references.*pack_t2va"),
        (lambda: pack_ref2va(3, (2, 4, 4), 2, [AudioReference(2)]), "1 audio references alone"),
        (lambda: pack_ref2va(3, (2, 4, 4), 2, [ImageReference((2, 3))]), "width is 3"),
        (lambda: pack_ref2va(3, (2, 4, 4), 2, [ImageReference((2, 2))] * 10), "10 image .* up to 9"),
        (
            lambda: pack_ref2va(
                3,
                (2, 4, 4),
                2,
                [ImageReference((2, 2))] * 9 + [VideoReference((2, 2, 2)), AudioReference(1)] * 2,
            ),
            "13 references: .* up to 12",
        ),
        (lambda: pack_t2va(3, (2, 4, 4), 2).padded(0), "multiple of 0"),
        (lambda: pack_t2va(3, (2, 4, 4), 2).timesteps(1.5, 0.5), "video_time is 1.5; needs 0"),
        (lambda: pack_t2va(3, (2, 4, 4), 2).timesteps(0.5, float("nan")), "audio_time is nan"),
    ],
)
def test_refuses(call: object, text: str) -> None:
    assert callable(call)
    with pytest.raises(MetadataError, match=text):
        call()


def test_an_unknown_packing_is_answered_with_the_known_ones() -> None:
    assert get_packing("fl2va") is pack_fl2va
    with pytest.raises(ConfigError, match=r"'f2va'. Did you mean '[ft]\w*2va'\? .*t2va, fl2va, ref2va"):
        get_packing("f2va")
