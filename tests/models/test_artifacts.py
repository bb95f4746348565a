"""Files that a run leaves: what is in them."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from omni_attn.errors import ConfigError
from omni_attn.models import artifacts
from omni_attn.models.artifacts import (
    create_output_folder,
    font_of_size,
    latents_to_frames,
    replace_whole,
    save_contact_sheet,
    save_frames,
    save_latents,
    video_to_frames,
)


def test_latents_and_their_metadata(tmp_path: Path) -> None:
    latents = torch.randn(1, 4, 2, 3, 5, dtype=torch.bfloat16).transpose(3, 4)
    with safe_open(save_latents(tmp_path / "x.safetensors", latents, {"seed": "3"}), "pt") as file:
        assert file.metadata() == {"seed": "3"}
        assert list(file.keys()) == ["latents"]
        assert torch.equal(file.get_tensor("latents"), latents.float())


def test_the_strongest_component_is_brightness() -> None:
    ramp = torch.linspace(-1, 1, 20).expand(6, 20)
    latents = torch.randn(16, 1, 1, 1) * ramp + 0.01 * torch.randn(16, 3, 6, 20)
    frames = latents_to_frames(latents)
    assert (frames.dtype, frames.shape) == (torch.uint8, (3, 6, 20, 3))
    brightness = frames.float().mean(dim=(0, 1, 3))
    assert torch.corrcoef(torch.stack([brightness, ramp[0]]))[0, 1].abs() > 0.98
    assert brightness.max() - brightness.min() > 150


def test_a_view_does_not_depend_on_offset_or_scale() -> None:
    latents = torch.randn(16, 3, 8, 8)
    offset = torch.randn(16, 1, 1, 1)
    frames, moved = latents_to_frames(latents).int(), latents_to_frames(3 * latents + offset).int()
    assert (frames - moved).abs().max() <= 1


@pytest.mark.parametrize("channels", [1, 2, 48])
def test_any_number_of_channels(channels: int) -> None:
    assert latents_to_frames(torch.randn(channels, 2, 4, 4)).shape == (2, 4, 4, 3)


def test_views_of_odd_latents() -> None:
    assert latents_to_frames(torch.zeros(16, 2, 4, 4)).unique().numel() == 1
    broken = torch.randn(16, 2, 4, 4)
    broken[0, 0, 0, 0], broken[1, 0, 0, 0] = torch.nan, torch.inf
    assert latents_to_frames(broken).unique().numel() > 10


def test_video_frames_are_written_as_they_are(tmp_path: Path) -> None:
    video = torch.linspace(-1.2, 1.2, 3 * 2 * 4 * 6).view(3, 2, 4, 6)
    frames = video_to_frames(video)
    assert (frames.min(), frames.max(), frames.shape) == (0, 255, (2, 4, 6, 3))
    paths = save_frames(tmp_path, frames)
    assert [path.name for path in paths] == ["frame_0000.png", "frame_0001.png"]
    with Image.open(paths[1]) as picture:
        assert picture.size == (6, 4)
        assert picture.getpixel((5, 3)) == tuple(frames[1, 3, 5].tolist())


@pytest.mark.parametrize("count", [1, 3, 5, 9, 21, 81])
def test_a_sheet_shows_the_frames(tmp_path: Path, count: int) -> None:
    frames = torch.randint(0, 256, (count, 6, 10, 3), dtype=torch.uint8)
    path = save_contact_sheet(
        tmp_path / "sheet.png", frames, title="t", caption=["a long line " * 8], unit="frame"
    )
    with Image.open(path) as sheet:
        assert 80 < sheet.width <= 1300 and 60 < sheet.height < 1600
        assert sheet.getpixel((0, 0)) == sheet.getpixel((sheet.width - 1, sheet.height - 1))  # margins
        assert len(sheet.getcolors(2**24)) > 50


def test_labels_of_small_frames_do_not_run_into_one_another(tmp_path: Path) -> None:
    """Two white frames of 8 x 8, enlarged by 8 at most: the second picture begins behind the first one's label."""
    frames = torch.full((2, 8, 8, 3), 255, dtype=torch.uint8)
    path = save_contact_sheet(tmp_path / "sheet.png", frames, title="t", caption=[], unit="latent frame")
    label = math.ceil(font_of_size(14).getlength("latent frame 0"))
    assert label > 64
    with Image.open(path) as sheet:
        white = [x for x in range(sheet.width) if sheet.getpixel((x, 24 + 40 + 32)) == (255, 255, 255)]
    gaps = [right - left for left, right in pairwise(white) if right - left > 1]
    assert len(white) == 2 * 64 and len(gaps) == 1 and gaps[0] + 63 > label


@pytest.mark.parametrize("breaks", [False, True])
def test_a_file_that_is_written_again_is_whole_at_any_moment(tmp_path: Path, breaks: bool) -> None:
    path = tmp_path / "sheet.png"
    path.write_text("before")

    def write(place: Path) -> None:
        place.write_text("af")
        assert path.read_text() == "before"
        if breaks:
            raise OSError("no space left")
        place.write_text("after")

    with pytest.raises(OSError, match="no space left") if breaks else nullcontext():
        assert replace_whole(path, write) == path
    assert path.read_text() == ("before" if breaks else "after")
    assert list(tmp_path.iterdir()) == [path]


def test_results_replace_what_was_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames, replaced = torch.zeros(1, 8, 8, 3, dtype=torch.uint8), []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (replaced.append(Path(b).name), replace(a, b)))
    save_latents(tmp_path / "x.safetensors", torch.zeros(1, 1, 1, 2, 2), {})
    save_frames(tmp_path, frames)
    save_contact_sheet(tmp_path / "sheet.png", frames, title="t", caption=[], unit="frame")
    assert replaced == ["x.safetensors", "frame_0000.png", "sheet.png"]


def test_folders(tmp_path: Path) -> None:
    folder = create_output_folder(str(tmp_path / "a" / "b"))
    assert folder.is_dir() and create_output_folder(str(folder)) == folder
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output: .*file.* cannot be a folder here"):
        create_output_folder(str(tmp_path / "file"))


def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(artifacts, "TemporaryFile", refuse)  # root may write into any folder
    with pytest.raises(
        ConfigError, match=r"output: no file can be written into .*Permission denied.*another"
    ):
        create_output_folder(str(tmp_path))
