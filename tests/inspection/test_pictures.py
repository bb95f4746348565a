"""Pictures show what they say: colours by selection and mass, numbers and frames on their axes."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from omni_attn.inspection.drawing import (
    LEFT_OUT,
    SELECTED,
    TICK_SPACING,
    enlarged,
    frame_spans,
    log_share,
    map_colours,
    pixels_per_tile,
    tick_numbers,
)
from omni_attn.inspection.figures import figures_of_all, figures_of_heads
from omni_attn.inspection.inspection import Inspection
from omni_attn.inspection.mass import compare_with_dense
from omni_attn.inspection.pictures import write_pictures
from omni_attn.inspection.speed import Speed
from omni_attn.inspection.target import Target
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.selection import block_map
from omni_attn.ops.video_tiles import video_tiles
from tests.inspection.calls import SCALE, sparse_call

CPU = torch.device("cpu")


def inspection(topk: int = 3, **options: Any) -> Inspection:
    call = sparse_call(topk, **options)
    found = compare_with_dense(call.query, call.key, call.value, call.output, call.selection, SCALE)
    return Inspection(
        target=Target(1, 2),
        name="transformer.blocks.2",
        label="TILED_TEST",
        source="default",
        route="TILED_TEST: SPARSE",
        num_steps=4,
        sigma=0.5,
        grid=options.get("grid", (3, 5, 4)),
        device="cpu",
        dtype="float64",
        selection=call.selection,
        compared=found,
        heads=figures_of_heads(call.selection, found),
        total=figures_of_all(call.selection, found),
        dense_error=0.0,
        speed=Speed(dense="d", dense_ms=1, sparse_ms=1, rounds=1, method="m", predicted=1),
        notes=(),
    )


def test_hue_is_the_selection_and_brightness_the_mass() -> None:
    mass = torch.tensor([[1.0, 1e-2, 0.0], [1.0, 1e-2, 0.0]])
    chosen = torch.tensor([[True] * 3, [False] * 3])
    colours = map_colours(mass, chosen)
    assert colours[0, 0].tolist() == list(SELECTED.stops[-1])
    assert colours[0, 2].tolist() == list(SELECTED.stops[0])
    assert colours[1, 0].tolist() == list(LEFT_OUT.stops[-1])
    assert colours[1, 2].tolist() == list(LEFT_OUT.stops[0])
    brightness = colours.int().sum(-1)
    assert (brightness[:, :-1] > brightness[:, 1:]).all()


def test_shares_are_logarithmic() -> None:
    shares = log_share(torch.tensor([1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-9, 0.0]))
    torch.testing.assert_close(shares, torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]))


def test_frames_of_tiles() -> None:
    tiles = video_tiles((3, 4, 4), (2, 4, 2), CPU)
    assert frame_spans(tiles, (3, 4, 4)) == [(0, 2, "frames 0-1"), (2, 4, "frame 2")]
    assert frame_spans(tiles, None) == []
    assert frame_spans(BlockPartition.in_order(50, 16, CPU), (3, 4, 4)) == []  # more than the video


def test_frames_of_tiles_behind_other_tokens() -> None:
    tiles = video_tiles((3, 4, 4), (2, 4, 2), CPU, (20, 5))
    assert frame_spans(tiles, (3, 4, 4), 25) == [(0, 3, "prefix"), (3, 5, "frames 0-1"), (5, 7, "frame 2")]
    in_order = BlockPartition.in_order(25 + 48, 16, CPU)
    assert frame_spans(in_order, (3, 4, 4), 25) == [
        *[(0, 1, "prefix"), (1, 2, "prefix and video")],
        *[(2, 3, "frames 0-1"), (3, 4, "frames 1-2"), (4, 5, "frame 2")],
    ]
    assert frame_spans(tiles, (3, 4, 4), 24) == []


@pytest.mark.parametrize(("tiles", "pixels"), [(1, 56.0), (18, 40.0), (624, 1.0), (1440, 0.53), (4000, 0.5)])
def test_numbers_have_room(tiles: int, pixels: float) -> None:
    numbers = tick_numbers(tiles, pixels)
    assert numbers[0] == 0 and numbers[-1] < tiles
    steps = {b - a for a, b in pairwise(numbers)}
    assert len(steps) <= 1 and all(step * pixels >= TICK_SPACING for step in steps)


def test_tiles_have_whole_pixels_where_they_can() -> None:
    assert [pixels_per_tile(n, 760, 56) for n in (1, 18, 624)] == [56.0, 42.0, 1.0]
    assert pixels_per_tile(1000, 760, 56) == 0.76
    assert pixels_per_tile(10_000, 760, 56) == 0.5


def test_enlarged_tiles_stay_sharp() -> None:
    colours = torch.tensor([[[255, 0, 0], [0, 255, 0]]], dtype=torch.uint8)
    large = enlarged(colours, 20, 10)
    assert large.size == (20, 10)
    assert sorted(large.getcolors()) == [(100, (0, 255, 0)), (100, (255, 0, 0))]
    assert enlarged(colours, 1, 1).getpixel((0, 0)) == (128, 128, 0)


def test_files(tmp_path: Path) -> None:
    found = inspection()
    files = write_pictures(tmp_path, found)
    names = ["block_maps.png", "mass_kept.png", *(f"head_0{head}.png" for head in range(4))]
    assert [file.name for file in files] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    number = found.selection.key_blocks.num_blocks
    chosen = block_map(found.selection.selected, number)[0]
    for head in range(4):
        expected = map_colours(found.compared.mass[0, head], chosen[head])
        with Image.open(tmp_path / f"head_0{head}.png") as picture:
            size = round(pixels_per_tile(number, 760, 56))
            left, top = 24 + 152, 24 + 84
            for row in range(number):
                for column in range(number):
                    middle = (left + column * size + size // 2, top + row * size + size // 2)
                    assert list(picture.getpixel(middle)) == expected[row, column].tolist()


@pytest.mark.parametrize(
    ("grid", "tile", "heads", "topk"),
    [((1, 2, 2), (2, 2, 2), 1, 1), ((9, 12, 16), (1, 1, 2), 12, 3), ((5, 6, 7), (2, 3, 3), 40, 2)],
)
def test_any_number_of_tiles_and_heads(
    tmp_path: Path, grid: tuple[int, int, int], tile: tuple[int, int, int], heads: int, topk: int
) -> None:
    found = inspection(topk, grid=grid, tile=tile, heads=heads, kv_heads=heads, batch=1)
    files = write_pictures(tmp_path, found)
    assert len(files) == 2 + heads
    for file in files:
        with Image.open(file) as picture:
            assert 300 < picture.width < 2200 and 200 < picture.height < 2200
