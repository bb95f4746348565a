"""What is kept of partitions: it serves every kind of call, and lives as long as a captured graph may need it."""

from __future__ import annotations

import pytest
import torch

from omni_attn.errors import MetadataError
from omni_attn.ops import video_tiles as module
from omni_attn.ops.block_sparse import kept
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.pieces import Pieces, cut
from omni_attn.ops.block_sparse.rainfusion import RainFusionLayout, rainfusion_blocks
from omni_attn.ops.video_tiles import video_tiles

CPU = torch.device("cpu")
OF_PIECES = ("first_rows", "block_of", "sizes", "tokens", "rows", "ends")


def all_of(pieces: Pieces) -> list[torch.Tensor]:
    runs = (pieces._all, pieces._whole, pieces._ragged)
    return [*(getattr(pieces, name) for name in OF_PIECES), *(x for run in runs for x in run[:2])]


def test_pieces_first_used_for_inference_serve_training_too() -> None:
    with torch.inference_mode():
        pieces = cut(BlockPartition.in_order(70, 32, CPU), 16)
        all_of(pieces)
    assert not any(x.is_inference() for x in all_of(pieces))


def test_pieces_are_cut_once_for_a_unit() -> None:
    blocks = BlockPartition.in_order(70, 32, CPU)
    assert cut(blocks, 16) is cut(blocks, 16) is not cut(blocks, 8)
    assert cut(blocks, 16).tokens is cut(blocks, 16).tokens


def test_a_partition_is_made_on_the_device_that_was_asked_for() -> None:
    """Whatever the default is, as while a model is constructed."""
    with torch.device("meta"):
        tiles, blocks = video_tiles((2, 3, 11), (2, 2, 2), CPU), BlockPartition.in_order(33, 16, CPU)
        of_tiles, of_pieces = tiles.block_of, all_of(cut(blocks, 8))
    assert all(x.device == CPU for x in (tiles.order, of_tiles, *of_pieces))


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a CUDA graph is being captured, as a switch."""
    state = [False]
    monkeypatch.setattr(kept, "is_capturing", lambda device: state[0])
    monkeypatch.setattr(kept, "_captured", set())
    return state


def test_nothing_is_made_inside_a_capture(capturing: list[bool]) -> None:
    """It would be filled by replays alone, and later calls would read it."""
    blocks = BlockPartition.in_order(70, 32, CPU)
    assert blocks.block_sizes.tolist() == [32, 32, 6]
    capturing[0] = True
    assert blocks.block_sizes.tolist() == [32, 32, 6]
    for make in (
        lambda: blocks.block_of,
        lambda: cut(blocks, 16),
        lambda: video_tiles((3, 1, 13), (2, 2, 2), CPU),
        lambda: rainfusion_blocks(RainFusionLayout(77, ()), 16, CPU),
    ):
        with pytest.raises(MetadataError, match="run it once before capturing"):
            make()
    capturing[0] = False
    assert blocks.block_of.tolist() == [0] * 32 + [1] * 32 + [2] * 6


def test_captured_tiles_stay(capturing: list[bool]) -> None:
    """A graph knows their addresses, whatever other grids come and go."""
    layout = RainFusionLayout(64, ((0, (1, 8, 8)),))
    tiles, blocks = video_tiles((2, 3, 4), (2, 2, 2), CPU), rainfusion_blocks(layout, 16, CPU)
    assert not kept._captured
    capturing[0] = True
    assert video_tiles((2, 3, 4), (2, 2, 2), CPU) is tiles
    assert rainfusion_blocks(layout, 16, CPU) is blocks
    capturing[0] = False
    module._video_tiles.cache_clear()
    assert kept._captured == {tiles, blocks}
