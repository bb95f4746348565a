"""Triton's lists and passes around a kernel, against torch's: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from omni_attn.ops.block_sparse import kernels, pieces, rows
from omni_attn.ops.block_sparse.executor import CoarseTerm, SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.pieces import PieceLists, Pieces
from omni_attn.ops.video_tiles import video_tiles
from tests.ops.triton_here import DEVICE, needs_triton


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Switches between the kernels and torch's operators, whatever the device is."""

    def switch(on: bool) -> None:
        for module in (pieces, rows):
            monkeypatch.setattr(module, "kernels_for", lambda *_: kernels._kernels() if on else None)
        monkeypatch.setattr("omni_attn.ops.block_sparse.means.kernels_for", lambda *_: None)

    return switch


def both(switch: Callable[[bool], None], call: Callable[[], object]) -> tuple[object, object]:
    switch(True)
    found = call()
    switch(False)
    return found, call()


def choice(heads: int, blocks: BlockPartition, cap: int) -> SelectedBlocks:
    generator = torch.Generator().manual_seed(0)
    indices = (
        torch.rand(2, heads, 3, blocks.num_blocks, generator=generator).argsort(-1)[..., :cap].sort(-1).values
    )
    counts = torch.randint(0, cap + 1, (2, heads, 3), generator=generator, dtype=torch.int32)
    counts[0, 0, 0], counts[1, 1, 1] = 0, cap
    return SelectedBlocks(indices.to(DEVICE, torch.int32), counts.to(DEVICE))


@needs_triton
@pytest.mark.parametrize("cap", [1, 5, 12])
@pytest.mark.parametrize("unit", [1, 4, 64])
@pytest.mark.parametrize("kind", ["pieces_of", "whole_pieces_of", "ragged_pieces_of"])
def test_lists(with_triton: Callable[[bool], None], kind: str, unit: int, cap: int) -> None:
    blocks = video_tiles((5, 6, 20), (4, 4, 8), DEVICE)
    selected = choice(2, blocks, cap)
    found, wanted = both(with_triton, lambda: getattr(pieces.cut(blocks, unit), kind)(selected))
    assert isinstance(found, PieceLists) and isinstance(wanted, PieceLists)
    assert torch.equal(found.counts, wanted.counts) and found.indices.shape == wanted.indices.shape
    valid = torch.arange(found.indices.shape[-1], device=DEVICE) < found.counts[..., None]
    assert torch.equal(found.indices.where(valid, -1), wanted.indices.where(valid, -1))


@needs_triton
def test_shifted_lists_and_sums(with_triton: Callable[[bool], None]) -> None:
    blocks = video_tiles((5, 6, 20), (4, 4, 8), DEVICE)
    selected = choice(2, blocks, 5)
    shift = torch.tensor([[0, 1000], [2000, 3000]], dtype=torch.int32, device=DEVICE)
    cut = pieces.cut(blocks, 8)
    found, wanted = both(with_triton, lambda: cut.pieces_of(selected, shift))
    assert isinstance(found, PieceLists) and isinstance(wanted, PieceLists)
    valid = torch.arange(found.indices.shape[-1], device=DEVICE) < found.counts[..., None]
    assert torch.equal(found.indices.where(valid, -1), wanted.indices.where(valid, -1))
    sums, expected = both(with_triton, lambda: pieces.selected_tokens(selected, blocks))
    assert isinstance(sums, torch.Tensor) and isinstance(expected, torch.Tensor)
    assert torch.equal(sums, expected)


@needs_triton
@pytest.mark.parametrize("unit", [1, 16, 64])
@pytest.mark.parametrize("size", [16, 40])
def test_there(with_triton: Callable[[bool], None], unit: int, size: int) -> None:
    blocks = video_tiles((3, 5, 6), (2, 4, 4), DEVICE)
    cut = pieces.cut(blocks, unit)
    tensor = torch.randn(2, 3, blocks.tokens, 2 * size, device=DEVICE)[..., :size].transpose(1, 2)
    (found, means), (wanted, expected) = both(with_triton, lambda: rows.gather_rows(tensor, cut))  # type: ignore[misc]
    held = valid_rows(cut)
    assert found.is_contiguous() and torch.equal(found[:, :, held], wanted[:, :, held])
    assert bool((found[:, :, ~held] == 0).all())
    torch.testing.assert_close(means, expected)


@needs_triton
@pytest.mark.parametrize("unit", [1, 64])
@pytest.mark.parametrize("coarse", [None, "plain", "gated"])
def test_back(with_triton: Callable[[bool], None], unit: int, coarse: str | None) -> None:
    blocks = video_tiles((3, 5, 6), (2, 4, 4), DEVICE)
    cut = pieces.cut(blocks, unit)
    gate = torch.randn(2, 3, blocks.tokens, 24, device=DEVICE).transpose(1, 2) if coarse == "gated" else None
    term = CoarseTerm(torch.randn(2, 3, blocks.num_blocks, 24, device=DEVICE), gate) if coarse else None
    packed = torch.randn(2, cut.num_pieces * unit, 3, 24, device=DEVICE).transpose(1, 2)
    packed[:, :, ~valid_rows(cut)] = float("nan")
    found, wanted = both(with_triton, lambda: rows.restore_rows(packed, cut, term))
    assert isinstance(found, torch.Tensor) and found.is_contiguous()
    torch.testing.assert_close(found, wanted)


def valid_rows(cut: Pieces) -> torch.Tensor:
    """bool [rows]: those that hold a token of their own."""
    held = torch.zeros(cut.num_pieces * cut.unit, dtype=torch.bool, device=DEVICE)
    held[cut.rows] = True
    return held
