"""Rows of patches: their order, the way back, and what is refused."""

from __future__ import annotations

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents
from hypothesis import given
from hypothesis import strategies as st

from omni_attn.errors import MetadataError
from omni_attn.models.minimax_h3.patches import audio_to_rows, patchify, rows_to_audio, unpatchify


@given(st.tuples(*[st.integers(1, 3)] * 8))
def test_rows_are_those_of_diffusers_and_lead_back(sizes: tuple[int, ...]) -> None:
    batch, channels, frames, rows, columns, *patch = sizes
    pt, ph, pw = patch
    shape = (batch, channels, frames * pt, rows * ph, columns * pw)
    latents = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    found = patchify(latents, (pt, ph, pw))
    wanted = [patchify_video_latents(latents[item : item + 1], (pt, ph, pw)) for item in range(batch)]
    assert torch.equal(found, torch.stack(wanted))
    back = unpatchify(found, (frames, rows, columns), (pt, ph, pw))
    assert back.is_contiguous() and torch.equal(back, latents)


def test_channels_are_slowest_in_a_row() -> None:
    latents = torch.arange(2 * 1 * 2 * 4).view(1, 2, 1, 2, 4)
    assert patchify(latents)[0].tolist() == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


def test_sound_is_channel_major() -> None:
    latents = torch.randn(2, 2, 5, 3)
    rows = audio_to_rows(latents)
    assert rows.shape == (2, 6, 5)
    assert torch.equal(rows[1, 3], latents[1, 1, :, 0])
    assert torch.equal(rows_to_audio(rows), latents)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: patchify(torch.zeros(24, 1, 2, 2)), r"\[24, 1, 2, 2\]; needs \[batch, channels"),
        (lambda: patchify(torch.zeros(1, 24, 1, 3, 2)), "height is 3, which patches of 2 do not fill. Use 2"),
        (lambda: patchify(torch.zeros(1, 24, 1, 2, 0)), "width is 0.*Use 2"),
        (
            lambda: unpatchify(torch.zeros(1, 5, 96), (1, 2, 3)),
            r"\[1, 5, 96\]; a grid of 1 x 2 x 3 needs \[batch, 6",
        ),
        (lambda: unpatchify(torch.zeros(1, 6, 95), (1, 2, 3)), r"\[1, 6, 95\].*channels \* 4"),
        (lambda: audio_to_rows(torch.zeros(1, 3, 5, 2)), r"\[1, 3, 5, 2\]; needs \[batch, 2"),
        (lambda: rows_to_audio(torch.zeros(1, 5, 32)), r"\[1, 5, 32\]; needs \[batch, 2 \* latents"),
    ],
)
def test_refuses(call: object, text: str) -> None:
    assert callable(call)
    with pytest.raises(MetadataError, match=text):
        call()
