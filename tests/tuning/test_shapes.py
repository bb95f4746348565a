"""The named shapes are the published ones, and a misspelt name is told."""

from __future__ import annotations

from math import prod

import pytest

from omni_attn.errors import ConfigError
from omni_attn.tuning.shapes import LARGE, SHAPES, SMALL, shapes_named

PUBLISHED = {  # B, Sq, Sk, H, D
    "flux-1024": (1, 4608, 4608, 24, 128),
    "sd3-1024": (2, 4250, 4250, 24, 64),
    "wan-1.3b-480p": (1, 32760, 32760, 12, 128),
    "wan-14b-480p-cross": (1, 32760, 512, 40, 128),
    "wan-14b-720p": (1, 75600, 75600, 40, 128),
    "wan2.2-5b-720p": (1, 27280, 27280, 24, 128),
    "hunyuanvideo-720p": (1, 118800, 118800, 24, 128),
    "hunyuanvideo-720p-padded": (1, 119056, 119056, 24, 128),
    "minimax-h3-5s": (1, 37740, 37740, 56, 128),
    "ltx-512p": (1, 4992, 4992, 32, 64),
}


def test_large_shapes() -> None:
    found = {
        name: (s.batch, s.queries, s.keys, s.heads, s.head_size)
        for name in LARGE
        for s in shapes_named([name])
    }
    assert found == PUBLISHED


def test_grids_are_the_whole_sequence() -> None:
    with_grid = [shape for shape in SHAPES.values() if shape.grid is not None]
    assert with_grid
    for shape in with_grid:
        assert prod(shape.grid or ()) == shape.queries == shape.keys
        assert shape.kept_keys is None


def test_padding_hides_a_part_of_the_text() -> None:
    assert SHAPES["hunyuanvideo-720p-padded"].kept_keys == 118800 + 40
    assert "118840 keys kept" in str(SHAPES["hunyuanvideo-720p-padded"])


def test_small_ones_are_small() -> None:
    assert {*SMALL, *LARGE} == set(SHAPES)
    assert max(SHAPES[name].queries for name in SMALL) <= 512


def test_unknown_names_all_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        shapes_named(["tiny", "wan-14b-72p", "nothing-alike"])
    first, second = error.value.problems
    assert "Did you mean wan-14b-720p?" in first and "flux-1024" in first
    assert "'nothing-alike' is not a named shape. Shapes:" in second
