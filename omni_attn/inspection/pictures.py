"""The pictures of an inspection: a block map per head, all of them on one sheet, and the mass that was kept."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from omni_attn.inspection.drawing import (
    KEPT,
    LEFT_OUT,
    SELECTED,
    Pen,
    enlarged,
    frame_spans,
    map_colours,
    pixels_per_tile,
)
from omni_attn.inspection.figures import Figures
from omni_attn.inspection.inspection import Inspection
from omni_attn.models.artifacts import INK, sheet_columns
from omni_attn.ops.block_sparse.selection import block_map

_MARGIN = 24
_SHARES = ("0.01 %", "0.1 %", "1 %", "10 %", "100 %")
_TEAL = (56, 178, 160)
_LINE = (44, 48, 56)


def write_pictures(folder: Path, found: Inspection) -> tuple[Path, ...]:
    """block_maps.png, mass_kept.png, head_00.png, head_01.png, ...; of a batch, its first item.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    chosen = block_map(found.selection.selected, found.selection.key_blocks.num_blocks)[0].cpu()
    mass, kept = found.compared.mass[0], found.compared.kept[0]
    files = [folder / "block_maps.png", folder / "mass_kept.png"]
    _sheet(found, mass, chosen).save(files[0])
    _mass_kept(found, kept).save(files[1])
    for figures in found.heads:
        assert figures.head is not None
        files.append(folder / f"head_{figures.head:02d}.png")
        head = figures.head
        _head(found, figures, map_colours(mass[head], chosen[head]), kept[head]).save(files[-1])
    return tuple(files)


def call_line(found: Inspection) -> str:
    """Layer, step and backend in one line."""
    steps = "" if found.num_steps is None else f" of {found.num_steps}"
    sigma = "" if found.sigma is None else f" (sigma {found.sigma:.3f})"
    target = found.target
    return f"layer {target.layer} ({target.role}), step {target.step}{steps}{sigma}, {found.label}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _tiles(found: Inspection, figures: Figures) -> str:
    number = found.selection.key_blocks.num_blocks
    return f"{figures.tiles * number:.4g} of {number} key tiles"


def _head(found: Inspection, figures: Figures, colours: torch.Tensor, kept: torch.Tensor) -> Pen:
    """The map of one head, and beside each of its rows the mass that is kept."""
    queries, keys = found.selection.query_blocks, found.selection.key_blocks
    pixels = pixels_per_tile(max(queries.num_blocks, keys.num_blocks), 760, 56)
    width, height = round(keys.num_blocks * pixels), round(queries.num_blocks * pixels)
    left, top, profile = _MARGIN + 152, _MARGIN + 84, 150
    pen = Pen(max(left + width + 30 + profile + 2 * _MARGIN, 720), top + height + 176)
    pen.text(_MARGIN, _MARGIN - 4, f"head {figures.head}, {call_line(found)}", size=20, fill=INK)
    pen.text(
        _MARGIN,
        _MARGIN + 26,
        f"{_tiles(found, figures)}; {_percent(figures.effective_sparsity)} of the token pairs left out",
    )
    least = f"least {_percent(figures.least_mass_kept)} in query tile {figures.least_tile}"
    pen.text(_MARGIN, _MARGIN + 46, f"attention mass kept: {_percent(figures.mass_kept)}, {least}")

    pen.paste(enlarged(colours, width, height), left, top)
    rows, columns = (frame_spans(blocks, found.grid, found.before) for blocks in (queries, keys))
    pen.tile_axis(left, top, queries.num_blocks, pixels, rows, name="query tile", downwards=True)
    pen.tile_axis(left, top + height, keys.num_blocks, pixels, columns, name="key tile")

    x = left + width + 30
    for share in (0, 0.5, 1):
        pen.draw.line([(x + share * profile, top), (x + share * profile, top + height)], fill=_LINE)
        pen.text(x + share * profile, top + height + 9, f"{share:.0%}", size=12, anchor="ma")
    _profile(pen, kept, x, top, profile, height)
    pen.text(x + profile / 2, top + height + 52, "mass kept per query tile", anchor="ma")

    y = top + height + 92
    pen.legend(_MARGIN + 24, y, SELECTED, "selected: share of the row's mass", _SHARES, 240)
    pen.legend(_MARGIN + 344, y, LEFT_OUT, "left out: share of the row's mass", _SHARES, 240)
    return pen


def _profile(pen: Pen, kept: torch.Tensor, x: float, y: float, width: int, height: int) -> None:
    """A bar per row of pixels, as long as the share of the tile there."""
    rows = (torch.arange(height) * len(kept)) // height
    for row, share in enumerate(kept[rows].tolist()):
        if share > 0:
            pen.draw.line([(x, y + row), (x + share * width, y + row)], fill=_TEAL)


def _sheet(found: Inspection, mass: torch.Tensor, chosen: torch.Tensor) -> Pen:
    """All heads' maps, small."""
    heads, queries, keys = chosen.shape
    columns = sheet_columns(heads, queries, keys)
    gap, label = 18, 40
    pixels = pixels_per_tile(keys, (1320 - (columns - 1) * gap) // columns, 24)
    width, height = round(keys * pixels), round(queries * pixels)
    width, height = max(width, 150), max(height, round(150 * queries / keys))
    rows, top = math.ceil(heads / columns), _MARGIN + 64
    across = 2 * _MARGIN + columns * width + (columns - 1) * gap
    pen = Pen(max(across, 760), top + rows * (height + label + gap) + 84)
    pen.text(_MARGIN, _MARGIN - 4, f"block maps of {call_line(found)}", size=20, fill=INK)
    total = found.total
    pen.text(
        _MARGIN,
        _MARGIN + 28,
        f"rows: {queries} query tiles, columns: {keys} key tiles; {_percent(total.effective_sparsity)} of the token "
        f"pairs left out, {_percent(total.mass_kept)} of the attention mass kept",
    )
    for figures in found.heads:
        assert figures.head is not None
        row, column = divmod(figures.head, columns)
        x, y = _MARGIN + column * (width + gap), top + row * (height + label + gap)
        pen.paste(enlarged(map_colours(mass[figures.head], chosen[figures.head]), width, height), x, y)
        pen.text(x, y + height + 4, f"head {figures.head}", size=13, fill=INK)
        least = f"kept {_percent(figures.mass_kept)}, least {_percent(figures.least_mass_kept)}"
        pen.text(x, y + height + 21, least, size=12)
    y = top + rows * (height + label + gap)
    pen.legend(_MARGIN + 24, y, SELECTED, "selected: share of the row's mass", _SHARES, 240)
    pen.legend(_MARGIN + 344, y, LEFT_OUT, "left out: share of the row's mass", _SHARES, 240)
    return pen


def _mass_kept(found: Inspection, kept: torch.Tensor) -> Pen:
    """Heads by query tiles as a heat map; below it the mean of the heads, with the range between least and most."""
    heads, tiles = kept.shape
    pixels = pixels_per_tile(tiles, 960, 64)
    row = max(min(420 // heads, 26), 5)
    width, height, curve = round(tiles * pixels), heads * row, 200
    left, top = _MARGIN + 74, _MARGIN + 74
    pen = Pen(max(left + width + 150, 760), top + height + 24 + curve + 172)
    pen.text(_MARGIN, _MARGIN - 4, f"attention mass kept, {call_line(found)}", size=20, fill=INK)
    total = found.total
    pen.text(
        _MARGIN,
        _MARGIN + 28,
        f"share of the dense softmax that falls on selected tiles: {_percent(total.mass_kept)} on average, least "
        f"{_percent(total.least_mass_kept)}; {_percent(1 - total.pairs)} of the token pairs left out",
    )
    pen.paste(enlarged(KEPT.colours(kept), width, height), left, top)
    every = next(n for n in (1, 2, 5, 10, 20, 50) if n * row >= 13)
    for figures in found.heads:
        assert figures.head is not None
        if figures.head % every == 0:
            middle = top + (figures.head + 0.5) * row
            pen.text(left - 9, middle, str(figures.head), size=12, anchor="rm")
            pen.text(left + width + 9, middle, f"mean {_percent(figures.mass_kept)}", size=12, anchor="lm")
    pen.text_upwards(_MARGIN + 10, top + height / 2, "head")
    _curve(pen, kept, left, top + height + 24, width, curve)
    spans = frame_spans(found.selection.query_blocks, found.grid, found.before)
    pen.tile_axis(left, top + height + 24 + curve, tiles, pixels, spans, name="query tile")
    labels = ("0 %", "25 %", "50 %", "75 %", "100 %")
    pen.legend(_MARGIN + 24, top + height + curve + 116, KEPT, "mass kept (heat map)", labels, 240)
    return pen


def _curve(pen: Pen, kept: torch.Tensor, x: float, y: float, width: int, height: int) -> None:
    """Mean of the heads as a line over the range from the least to the most of them; 0 % at the bottom."""
    for share in (0, 0.25, 0.5, 0.75, 1):
        level = y + (1 - share) * height
        pen.draw.line([(x, level), (x + width, level)], fill=_LINE)
        pen.text(x - 9, level, f"{share:.0%}", size=12, anchor="rm")
    columns = (torch.arange(width) * kept.shape[1]) // width
    least, mean, most = (values[columns].tolist() for values in (kept.amin(0), kept.mean(0), kept.amax(0)))
    for column in range(width):
        ends = [(x + column, y + (1 - share[column]) * height) for share in (least, most)]
        pen.draw.line(ends, fill=(30, 78, 84))
    pen.draw.line([(x + c, y + (1 - mean[c]) * height) for c in range(width)], fill=(250, 250, 200), width=2)
    pen.text(x + width + 9, y + (1 - mean[-1]) * height, "mean of heads", size=12, anchor="lm")
    pen.text(
        x + width + 9, y + (1 - mean[-1]) * height + 16, "least to most", size=12, fill=_TEAL, anchor="lm"
    )
