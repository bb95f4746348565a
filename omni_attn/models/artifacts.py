"""What a run leaves behind: latents as safetensors, frames as pictures, and one contact sheet to look at.

Frames are uint8 tensors [N, H, W, 3] on the CPU (N frames, H rows, W columns).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from omni_attn.errors import ConfigError
from omni_attn.models.runtime import import_extra

# Colours of every picture: background, text, what stands back.
PAPER, INK, FAINT = (22, 24, 29), (232, 234, 240), (140, 146, 158)
_SHEET_WIDTH = 1200  # pixels, about; frames are enlarged towards it
_GAP, _MARGIN, _LABEL, _CAPTION = 10, 24, 20, 17
_MAX_FRAMES = 24  # on a sheet; longer videos are sampled evenly


def create_output_folder(path: str) -> Path:
    """The folder, created with its parents if it does not exist.

    Raises:
        ConfigError: it cannot be created, is a file, or takes no file.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output: {path!r} cannot be a folder here ({error}). Name another one.") from error
    try:
        with TemporaryFile(dir=folder):  # the only sure way to know, and before the hours that results take
            pass
    except OSError as error:
        raise ConfigError(
            f"output: no file can be written into {path!r} ({error}). Name another one."
        ) from error
    return folder


def replace_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Lets `write` make a file beside this one and then puts it there: who watches the folder never sees half of it."""
    unfinished = path.with_name(f".unfinished_{path.name}")
    try:
        write(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def save_latents(path: Path, latents: torch.Tensor, metadata: Mapping[str, str]) -> Path:
    """Write `latents`, float32, under the key "latents" of a safetensors file with these header entries."""
    safetensors = import_extra("safetensors.torch", f"Writing {path}")
    tensors = {"latents": latents.detach().float().cpu().contiguous()}
    return replace_whole(path, lambda place: safetensors.save_file(tensors, place, metadata=dict(metadata)))


def latents_to_frames(latents: torch.Tensor) -> torch.Tensor:
    """An RGB view of latents when there is no VAE, uint8 [T, H, W, 3].

    Every latent pixel of the whole clip is one point with C coordinates. Its first principal component is shown as
    brightness, the second and third as blue-yellow and red-green differences (YCbCr, ITU-R BT.601). Each is scaled so
    that the 1st and 99th percentile of the clip span its range. A component's sign is free: its largest coefficient
    is made positive, so that equal latents give equal pictures.

    Args:
        latents: [C, T, H, W], C >= 1; numbers that are not finite are shown as zeros.
    """
    channels, frames, height, width = latents.shape
    points = latents.detach().cpu().double().flatten(1).nan_to_num(0, 0, 0)
    points = points - points.mean(dim=1, keepdim=True)
    _, vectors = torch.linalg.eigh(points @ points.T)  # eigenvalues ascend
    axes = vectors.flip(1)[:, :3]
    largest = axes.gather(0, axes.abs().argmax(dim=0, keepdim=True))
    projected = (axes * largest.sign()).T @ points
    if channels < 3:
        projected = torch.cat([projected, projected.new_zeros(3 - channels, points.shape[1])])
    luma, blue, red = _robust_range(projected)
    luma, blue, red = 0.06 + 0.88 * luma, 0.55 * (blue - 0.5), 0.55 * (red - 0.5)
    rgb = torch.stack(
        [luma + 1.402 * red, luma - 0.344136 * blue - 0.714136 * red, luma + 1.772 * blue], dim=-1
    )
    return (rgb.clamp(0, 1) * 255).round().to(torch.uint8).view(frames, height, width, 3)


def _robust_range(rows: torch.Tensor) -> torch.Tensor:
    """Each row scaled so that its 1st and 99th percentile become 0 and 1, clamped; a constant row becomes 0.5."""
    ordered = rows.sort(dim=1).values
    last = rows.shape[1] - 1
    low, high = ordered[:, [round(0.01 * last)]], ordered[:, [round(0.99 * last)]]
    span = high - low
    return torch.where(span > 1e-12, (rows - low) / span.clamp_min(1e-12), 0.5).clamp(0, 1)


def video_to_frames(video: torch.Tensor) -> torch.Tensor:
    """A decoded video [3, N, H, W] in -1..1 as uint8 [N, H, W, 3]."""
    scaled = (video.detach().float().cpu().clamp(-1, 1) + 1) * 127.5
    return scaled.round().to(torch.uint8).permute(1, 2, 3, 0).contiguous()


def save_frames(folder: Path, frames: torch.Tensor, *, first: int = 0) -> tuple[Path, ...]:
    """Write frame_0000.png, frame_0001.png, ... into the folder; `first` is the number of the first one."""
    paths = []
    for index, frame in enumerate(frames, first):
        paths.append(replace_whole(folder / f"frame_{index:04d}.png", _to_picture(frame).save))
    return tuple(paths)


def save_contact_sheet(
    path: Path, frames: torch.Tensor, *, title: str, caption: Sequence[str], unit: str
) -> Path:
    """Write one picture with the clip's frames in a grid, their indices below them, and the caption under all.

    Args:
        path: a .png.
        frames: uint8 [N, H, W, 3]; of more than 24 frames, 24 evenly spaced ones are shown.
        title: the line on top.
        caption: lines below the grid.
        unit: what an index counts, "frame" or "latent frame".
    """
    pillow = import_extra("PIL.Image", f"Writing {path}")
    drawing = import_extra("PIL.ImageDraw", f"Writing {path}")
    shown = _evenly_spaced(len(frames), _MAX_FRAMES)
    height, width = frames.shape[1:3]
    columns = sheet_columns(len(shown), height, width)
    rows = math.ceil(len(shown) / columns)
    scale = min((_SHEET_WIDTH - 2 * _MARGIN - (columns - 1) * _GAP) / columns / width, 8.0)
    cell = (max(1, round(width * scale)), max(1, round(height * scale)))
    title_font, font = font_of_size(22), font_of_size(14)
    text_width = max([title_font.getlength(title), *(font.getlength(line) for line in caption)])
    labels = [f"{unit} {index}" for index in shown]
    # Small frames lie as far apart as their labels are long.
    pitch = max(cell[0], *(1 + math.ceil(font.getlength(label)) for label in labels)) + _GAP
    grid_width = columns * pitch - _GAP
    sheet_width = 2 * _MARGIN + max(grid_width, math.ceil(text_width))
    top = _MARGIN + 40
    grid_height = rows * (cell[1] + _LABEL + _GAP)
    sheet = pillow.new(
        "RGB", (sheet_width, top + grid_height + len(caption) * (_CAPTION + 3) + _MARGIN), PAPER
    )
    draw = drawing.Draw(sheet)
    draw.text((_MARGIN, _MARGIN - 4), title, font=title_font, fill=INK)
    for position, (index, label) in enumerate(zip(shown, labels, strict=True)):
        left = _MARGIN + position % columns * pitch
        upper = top + position // columns * (cell[1] + _LABEL + _GAP)
        sheet.paste(_to_picture(frames[index]).resize(cell, pillow.Resampling.BICUBIC), (left, upper))
        draw.text((left + 1, upper + cell[1] + 2), label, font=font, fill=FAINT)
    for number, line in enumerate(caption):
        draw.text((_MARGIN, top + grid_height + number * (_CAPTION + 3)), line, font=font, fill=FAINT)
    return replace_whole(path, sheet.save)


def _evenly_spaced(count: int, limit: int) -> list[int]:
    """All indices, or `limit` of them from the first to the last."""
    if count <= limit:
        return list(range(count))
    return [round(position * (count - 1) / (limit - 1)) for position in range(limit)]


def sheet_columns(count: int, height: int, width: int) -> int:
    """One row for up to four frames, else what makes the sheet closest to 3:2 without many empty cells."""
    if count <= 4:
        return count

    def badness(columns: int) -> float:
        rows = math.ceil(count / columns)
        aspect = columns * width / (rows * height)
        return abs(math.log(aspect / 1.5)) + 0.5 * (rows * columns - count) / count

    return min(range(1, count + 1), key=badness)


def _to_picture(frame: torch.Tensor) -> Any:
    pillow = import_extra("PIL.Image", "Writing pictures")
    return pillow.fromarray(frame.contiguous().numpy())


def font_of_size(size: int) -> Any:
    """Pillow's own font, in pixels."""
    return import_extra("PIL.ImageFont", "Writing pictures").load_default(size)
