"""Frames, pixels and audio latents against the published table and diffusers' arithmetic."""

from __future__ import annotations

import pytest
from diffusers.modular_pipelines.minimax_h3 import modular_pipeline as reference
from hypothesis import given
from hypothesis import strategies as st

from omni_attn.errors import ConfigError
from omni_attn.models.minimax_h3.sizes import (
    audio_latents,
    canvas_size,
    latent_size,
    size_problems,
    untrained_sizes,
)


@pytest.mark.parametrize(
    ("frames", "latent_frames", "audio"), [(124, 37, 207), (192, 57, 320), (243, 72, 405), (345, 102, 575)]
)
def test_published_lengths(frames: int, latent_frames: int, audio: int) -> None:
    assert latent_size(frames, 768, 1344) == (latent_frames, 48, 84)
    assert audio_latents(frames) == audio
    assert untrained_sizes(frames, 768, 1344) == []


@given(st.integers(0, 60))
def test_lengths_are_those_of_diffusers(chunks: int) -> None:
    frames = 17 * chunks + 5
    assert latent_size(frames, 64, 32)[0] == reference.video_latent_num_frames(frames, 17, 5)
    assert audio_latents(frames) == reference.audio_latent_num_frames(frames)


@given(st.integers(1, 400))
def test_other_lengths_are_refused_with_the_next_one(frames: int) -> None:
    aligned = reference.align_num_frames(frames, 17, 5)
    if aligned == frames:
        assert size_problems(frames, 32, 32) == []
        return
    (problem,) = size_problems(frames, 32, 32)
    assert f"num_frames is {frames}, " in problem
    below = [aligned - 17] if aligned > 5 else []
    assert problem.endswith(f"use {' or '.join(map(str, [*below, aligned]))}.")


def test_all_problems_of_a_size_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        latent_size(100, 770, 16)
    assert [problem.rpartition(": ")[2] for problem in caught.value.problems] == [
        "use 90 or 107.",
        "use 768 or 800.",
        "use 32.",
    ]


@given(st.integers(40, 3000), st.floats(0.26, 3.9))
def test_canvas_is_that_of_diffusers(width: int, shape: float) -> None:
    height = max(1, round(width * shape))
    found = canvas_size(height, width)
    wanted = reference.resolve_canvas_size(width, height, 32, 768, 768 * 1344)
    assert found == wanted
    assert untrained_sizes(124, *found) == []


def test_sizes_outside_of_training_are_named() -> None:
    frames, pixels = untrained_sizes(22, 384, 672)
    assert "22 frames are 0.9 seconds" in frames
    assert "384 x 672" in pixels and "768 x 1344" in pixels
    assert "362 frames are 15.1 seconds" in untrained_sizes(362, 768, 1344)[0]
    assert "1:4" in untrained_sizes(124, 320, 1344)[0]
    with pytest.raises(ConfigError, match=r"320 x 1344.*between 1:4 and 4:1"):
        canvas_size(320, 1344)
