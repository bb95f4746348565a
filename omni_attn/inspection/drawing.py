"""Parts of pictures: colour scales, enlarged maps of tiles, axes with tile numbers and frames, legends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from omni_attn.models.artifacts import FAINT, INK, PAPER, font_of_size
from omni_attn.models.runtime import import_extra
from omni_attn.ops.block_sparse.partition import BlockPartition

Colour = tuple[int, int, int]

#: Pixels between two numbers on an axis, at least.
TICK_SPACING = 46
PURPOSE = "Drawing a block map"


@dataclass(frozen=True)
class Scale:
    """Colours from 0 to 1, interpolated between stops that are evenly spaced."""

    stops: tuple[Colour, ...]

    def colours(self, values: torch.Tensor) -> torch.Tensor:
        """Values [...] as colours, uint8 [..., 3]; clamped to 0..1."""
        stops = torch.tensor(self.stops, dtype=torch.float32)
        places = values.float().nan_to_num(0).clamp(0, 1) * (len(stops) - 1)
        low = places.long().clamp(max=len(stops) - 2)
        part = (places - low)[..., None]
        return (stops[low] * (1 - part) + stops[low + 1] * part).round().to(torch.uint8)


#: Selected tiles are never dark and left-out ones never bright green, whatever their mass.
SELECTED = Scale(((17, 94, 112), (28, 164, 152), (134, 214, 130), (250, 250, 200)))
LEFT_OUT = Scale(((30, 33, 40), (88, 32, 44), (204, 62, 46), (255, 178, 84)))
KEPT = Scale(((68, 20, 62), (172, 48, 72), (236, 134, 62), (246, 222, 132), (252, 252, 236)))

#: Decades of the logarithmic scale of mass: from 0.01 % to 100 %.
_DECADES = 4


def log_share(mass: torch.Tensor) -> torch.Tensor:
    """Where a share of the mass lies on the logarithmic scale, 0..1."""
    return (mass.clamp_min(1e-30).log10() / _DECADES + 1).clamp(0, 1)


def map_colours(mass: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """A block map's colours, uint8 [Q, K, 3]: the hue says whether a tile is selected, the brightness its mass."""
    share = log_share(mass)
    return torch.where(chosen[..., None], SELECTED.colours(share), LEFT_OUT.colours(share))


def enlarged(colours: torch.Tensor, width: int, height: int) -> Any:
    """Colours [rows, columns, 3] as a picture of this size; tiles stay sharp, and are averaged where they shrink."""
    pillow = import_extra("PIL.Image", PURPOSE)
    picture = pillow.fromarray(colours.contiguous().numpy())
    shrinks = width < picture.width or height < picture.height
    return picture.resize((width, height), pillow.Resampling.BOX if shrinks else pillow.Resampling.NEAREST)


def pixels_per_tile(tiles: int, wanted: int, most: int) -> float:
    """Whole pixels where tiles are large enough to have some, else the fraction that fits `wanted`."""
    whole = min(wanted // tiles, most)
    return float(whole) if whole else max(wanted / tiles, 0.5)


def tick_numbers(tiles: int, pixels: float) -> list[int]:
    """Tiles that an axis numbers: every 1st, 2nd, 5th, 10th, ... so that the numbers have room."""
    step = next(s * 10**e for e in range(9) for s in (1, 2, 5) if s * 10**e * pixels >= TICK_SPACING)
    return list(range(0, tiles, step))


def frame_spans(
    blocks: BlockPartition, grid: tuple[int, int, int] | None, before: int = 0
) -> list[tuple[int, int, str]]:
    """Runs of blocks from the same frames: (first block, one past the last, "frames 0-3"); none without a grid.

    Args:
        blocks: of the whole sequence.
        grid: (T, H, W) of the video at its end.
        before: tokens before the video, which count as "prefix".
    """
    if grid is None or before + prod(grid) != blocks.tokens:
        return []
    order, offsets = blocks.order.cpu(), blocks.offsets.cpu().long()
    per_frame = grid[1] * grid[2]
    first, last = order[offsets[:-1]] - before, order[offsets[1:] - 1] - before
    spans: list[tuple[int, int, str]] = []
    for number, ends in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        name = _part_name(*ends, per_frame)
        if spans and spans[-1][2] == name:
            spans[-1] = (spans[-1][0], number + 1, name)
        else:
            spans.append((number, number + 1, name))
    return spans


def _part_name(first: int, last: int, per_frame: int) -> str:
    """Where a block lies whose ends are these tokens of the video; what lies before the video is negative."""
    if first < 0 and last < 0:
        return "prefix"
    if first < 0 or last < 0:
        return "prefix and video"
    low, high = first // per_frame, last // per_frame
    return f"frame {low}" if low == high else f"frames {low}-{high}"


class Pen:
    """Draws on one picture; places are pixels from its upper left corner."""

    def __init__(self, width: int, height: int) -> None:
        self.picture = import_extra("PIL.Image", PURPOSE).new("RGB", (width, height), PAPER)
        self.draw = import_extra("PIL.ImageDraw", PURPOSE).Draw(self.picture)

    def text(
        self, x: float, y: float, text: str, *, size: int = 14, fill: Colour = FAINT, anchor: str = "la"
    ) -> None:
        """Text with its anchor (Pillow's two letters) at a place."""
        self.draw.text((x, y), text, font=font_of_size(size), fill=fill, anchor=anchor)

    def text_upwards(self, x: float, y: float, text: str, *, size: int = 14) -> None:
        """Text that reads upwards, its middle at a place."""
        image = import_extra("PIL.Image", PURPOSE)
        width, height = round(font_of_size(size).getlength(text)) + 4, size + 6
        label = image.new("RGB", (width, height), PAPER)
        import_extra("PIL.ImageDraw", PURPOSE).Draw(label).text(
            (2, 1), text, font=font_of_size(size), fill=FAINT
        )
        self.picture.paste(label.rotate(90, expand=True), (round(x - height / 2), round(y - width / 2)))

    def paste(self, picture: Any, x: float, y: float) -> None:
        """Another picture, its upper left corner at a place."""
        self.picture.paste(picture, (round(x), round(y)))

    def tile_axis(
        self,
        x: float,
        y: float,
        tiles: int,
        pixels: float,
        spans: Sequence[tuple[int, int, str]],
        *,
        name: str,
        downwards: bool = False,
    ) -> None:
        """Numbers of tiles along an edge, the frames they come from, and the axis' name, beside it or below it.

        Args:
            x, y: where the edge starts.
            downwards: the edge runs down, with the labels on its left; else to the right, with the labels below.
        """

        def at(along: float, away: float) -> tuple[float, float]:
            return (x - away, y + along) if downwards else (x + along, y + away)

        for tile in tick_numbers(tiles, pixels):
            middle = (tile + 0.5) * pixels
            self.draw.line([at(middle, 2), at(middle, 6)], fill=FAINT)
            self.text(*at(middle, 9), str(tile), size=12, anchor="rm" if downwards else "ma")
        away = 40 if downwards else 28
        lengths = [(end - start) * pixels for start, end, _ in spans]
        needed = [16 if downwards else 7 * len(frames) for _, _, frames in spans]
        if spans and all(length >= need for length, need in zip(lengths, needed, strict=True)):
            for start, end, frames in spans:
                ends = [at(start * pixels + 1, away), at(end * pixels - 2, away)]
                self.draw.line(ends, fill=FAINT)
                middle = (start + end) / 2 * pixels
                self.text(*at(middle, away + 5), frames, size=12, anchor="rm" if downwards else "ma")
            away += 88 if downwards else 20
        middle = tiles * pixels / 2
        if downwards:
            self.text_upwards(x - away - 14, y + middle, name)
        else:
            self.text(x + middle, y + away + 6, name, anchor="ma")

    def legend(
        self, x: float, y: float, scale: Scale, name: str, labels: Sequence[str], width: int = 200
    ) -> None:
        """A colour bar with its name above it and labels below, evenly spaced from its left to its right end."""
        self.text(x, y, name, size=13, fill=INK)
        bar = scale.colours(torch.linspace(0, 1, width))[None].expand(12, -1, -1)
        self.paste(enlarged(bar, width, 12), x, y + 20)
        for number, label in enumerate(labels):
            self.text(x + number * width / (len(labels) - 1), y + 35, label, size=11, anchor="ma")

    def save(self, path: Any) -> None:
        """Writes the picture."""
        self.picture.save(path)
