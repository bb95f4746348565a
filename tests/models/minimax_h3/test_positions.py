"""Rotary coordinates against the worked numbers and diffusers' grids."""

from __future__ import annotations

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import before_denoise as reference
from hypothesis import given
from hypothesis import strategies as st

from omni_attn.models.minimax_h3.positions import (
    audio_positions,
    elapsed,
    spatial_axes,
    text_positions,
    video_positions,
)


def test_worked_example_of_space() -> None:
    rows, columns = spatial_axes((48, 84), (2, 2))
    assert rows.dtype == columns.dtype == torch.float64
    assert (len(rows), len(columns)) == (24, 42)
    assert rows[[0, 1, -1]].tolist() == pytest.approx([3.905137, 4.913042, 27.086958], abs=1e-6)
    assert columns[[0, -1]].tolist() == pytest.approx([-5.166010, 36.158105], abs=1e-6)


def test_worked_example_of_time() -> None:
    times = video_positions((8, 2, 2), (2, 2), 300.0)[:, 0]
    wanted = [300, 301.667, 308.333, 315, 321.667, 328.333, 330, 336.667]
    assert times.tolist() == pytest.approx(wanted, abs=1e-3)
    assert elapsed(37) == pytest.approx(206.667, abs=1e-3)


@given(st.integers(1, 60), st.integers(1, 60))
def test_space_is_that_of_diffusers_to_the_bit(rows: int, columns: int) -> None:
    size = (2 * rows, 2 * columns)
    grid, width_axis = reference._frame_position_grid(*size, 2, 2)
    assert torch.equal(video_positions((1, *size), (2, 2), 7.0)[:, 1:], grid)
    assert torch.equal(spatial_axes(size, (2, 2))[1], width_axis)


@given(st.integers(1, 110), st.integers(0, 900))
def test_time_is_that_of_diffusers_once_in_float32(frames: int, origin: int) -> None:
    times = video_positions((frames, 2, 2), (2, 2), float(origin))[:, 0]
    wanted = reference._temporal_position_grid(frames, float(origin))
    torch.testing.assert_close(times, wanted, atol=1e-12, rtol=1e-15)
    assert torch.equal(times.float(), wanted.float())


def test_video_rows_run_width_fastest() -> None:
    positions = video_positions((2, 4, 6), (2, 2), 0.0).view(2, 2, 3, 3)
    rows, columns = spatial_axes((4, 6), (2, 2))
    assert torch.equal(positions[1, 1, :, 1], rows[1].expand(3))
    assert torch.equal(positions[0, 1, :, 2], columns)


def test_text_and_sound() -> None:
    assert text_positions(3).tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    columns = torch.tensor([-5.0, 0.0, 36.0], dtype=torch.float64)
    assert audio_positions(2, columns, 10.0).tolist() == [[10, 0, -5], [11, 0, -5], [10, 0, 36], [11, 0, 36]]
