"""Blocks cut into pieces of a fixed number of rows, for kernels that have a block size of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.kept import kept
from omni_attn.ops.block_sparse.kernels import kernels_for
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.layout import int32_on


class PieceLists(NamedTuple):
    """Pieces that belong to the selected blocks of each query block.

    Attributes:
        indices: int32 [B, H, query blocks, width]; the first counts entries ascend, the rest means nothing.
        counts: int32 [B, H, query blocks].
    """

    indices: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, eq=False)
class Pieces:
    """The rows of a partition as such a kernel holds them: a block starts a piece and fills its pieces one by one.

    A block of n tokens has ceil(n / unit) pieces: one without a token does not exist, however large a whole block is.
    Rows behind a block's last token are for the kernel to mask. They hold zeros, or repeat that token, and so are as
    finite as the block itself.

    Attributes:
        blocks: the partition.
        unit: rows of a piece.
        numbers: pieces of each block, on the host.
        bounds: int32 [blocks + 1], the first piece of each block, then their number.
        made: what was made of the pieces, see kept.py.
    """

    blocks: BlockPartition
    unit: int
    numbers: tuple[int, ...]
    bounds: torch.Tensor
    made: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def device(self) -> torch.device:
        return self.bounds.device

    @property
    @kept
    def num_pieces(self) -> int:
        return sum(self.numbers)

    @property
    @kept
    def first_rows(self) -> torch.Tensor:
        """int32 [blocks + 1], the first row of each block, then the number of all rows."""
        return self.bounds * self.unit

    @property
    @kept
    def block_of(self) -> torch.Tensor:
        """int64 [pieces]: the block of each piece."""
        blocks = torch.arange(self.blocks.num_blocks, device=self.bounds.device)
        return torch.repeat_interleave(blocks, self.bounds.diff().long(), output_size=self.num_pieces)

    @property
    @kept
    def sizes(self) -> torch.Tensor:
        """int32 [pieces]: tokens of each piece, 1..unit."""
        block_of = self.block_of
        pieces = torch.arange(self.num_pieces, device=block_of.device, dtype=torch.int32)
        before = (pieces - self.bounds[block_of]) * self.unit
        return (self.blocks.block_sizes[block_of] - before).clamp(max=self.unit)

    @property
    @kept
    def tokens(self) -> torch.Tensor:
        """int64 [pieces * unit]: the token of the sequence in each row; those behind a block repeat its last token."""
        block_of, blocks = self.block_of, self.blocks
        pieces = torch.arange(self.num_pieces, device=block_of.device)
        first = blocks.offsets[block_of] + (pieces - self.bounds[block_of]) * self.unit
        rows = torch.arange(self.unit, device=block_of.device)
        places = first[:, None] + torch.minimum(rows, self.sizes[:, None].long() - 1)
        return blocks.order[places.flatten()].long()

    @property
    @kept
    def rows(self) -> torch.Tensor:
        """int64 [S]: the row of each token of the sequence."""
        block_of = self.blocks.block_of
        inside = self.blocks.places - self.blocks.offsets[block_of]
        return self.bounds[block_of].long() * self.unit + inside

    @property
    @kept
    def ends(self) -> torch.Tensor:
        """int32 [pieces]: the row behind the last token of each piece."""
        return (
            torch.arange(self.num_pieces, device=self.sizes.device, dtype=torch.int32) * self.unit
            + self.sizes
        )

    def pieces_of(self, selected: SelectedBlocks, shift: torch.Tensor | None = None) -> PieceLists:
        """All pieces of the selected blocks; `shift` int32 [B, H] is added to their numbers."""
        return _listed(selected, self._all, shift)

    def whole_pieces_of(self, selected: SelectedBlocks) -> PieceLists:
        """Those of them that are full of tokens."""
        return _listed(selected, self._whole)

    def ragged_pieces_of(self, selected: SelectedBlocks) -> PieceLists:
        """The others: at most one a block, its last."""
        return _listed(selected, self._ragged)

    def per_piece(self, lists: PieceLists) -> PieceLists:
        """Lists of query blocks as lists of these, the query blocks' pieces."""
        if self.num_pieces == self.blocks.num_blocks:
            return lists
        return PieceLists(*(x.index_select(2, self.block_of) for x in lists))

    @property
    @kept
    def _all(self) -> _Runs:
        return _Runs(self.bounds[:-1], self.bounds.diff(), _most(self.numbers))

    @property
    @kept
    def _whole(self) -> _Runs:
        most = _most([size // self.unit for size in self.blocks.sizes])
        return _Runs(self.bounds[:-1], self.blocks.block_sizes // self.unit, most)

    @property
    @kept
    def _ragged(self) -> _Runs:
        most = _most([int(size % self.unit > 0) for size in self.blocks.sizes])
        return _Runs(self.bounds[1:] - 1, (self.blocks.block_sizes % self.unit > 0).to(torch.int32), most)


class _Runs(NamedTuple):
    """Pieces that lie one behind the other, numbers[j] from firsts[j] on for block j; int32 [blocks].

    No choice of n + 1 blocks has more than most[n], which is at least 1, for kernels that take no empty list.
    """

    firsts: torch.Tensor
    numbers: torch.Tensor
    most: tuple[int, ...]


def _most(numbers: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(1, total) for total in accumulate(sorted(numbers, reverse=True)))


@kept
def cut(blocks: BlockPartition, unit: int) -> Pieces:
    """The pieces of a partition; kept for later calls."""
    numbers = tuple(-(-size // unit) for size in blocks.sizes)
    return Pieces(blocks, unit, numbers, int32_on(blocks.device, list(accumulate(numbers, initial=0))))


def selected_tokens(selected: SelectedBlocks, key_blocks: BlockPartition) -> torch.Tensor:
    """int32 [B, H, query blocks]: tokens of the selected blocks."""
    if (kernels := kernels_for(selected.counts)) is not None:
        return kernels.sum_selected(selected, key_blocks.block_sizes)  # type: ignore[no-any-return]
    [sizes] = _of_selected(selected, key_blocks.block_sizes)
    return sizes.sum(-1, dtype=torch.int32)


def _of_selected(selected: SelectedBlocks, *numbers: torch.Tensor) -> list[torch.Tensor]:
    """What int32 `numbers` [blocks] hold for each listed block, 0 behind the counts: [B, H, query blocks, cap]."""
    places = torch.arange(selected.indices.shape[-1], device=selected.indices.device, dtype=torch.int32)
    chosen = places < selected.counts[..., None]
    indices = selected.indices.where(chosen, 0)
    return [x[indices].where(chosen, 0) for x in numbers]


def _listed(selected: SelectedBlocks, runs: _Runs, shift: torch.Tensor | None = None) -> PieceLists:
    """The runs of the selected blocks, one behind the other.

    A list is a running sum of steps: 1 inside a run, and at its start what leads there from the run before. So what is
    written block by block has the size of `selected`, and the lists themselves are filled once and summed once.
    """
    width = runs.most[min(selected.indices.shape[-1], len(runs.most)) - 1]
    if (kernels := kernels_for(selected.counts)) is not None:
        return PieceLists(*kernels.list_runs(selected, runs.firsts, runs.numbers, runs.most[0], width, shift))
    first, length = _of_selected(selected, runs.firsts, runs.numbers)
    there = length > 0
    ends = length.cumsum(-1, dtype=torch.int32)
    last = (first + length - 1).where(there, 0).cummax(-1).values
    jump = (first - F.pad(last[..., :-1], (1, 0)) - 1).where(there, 0)
    steps = torch.ones(*selected.counts.shape, width, dtype=torch.int32, device=length.device)
    # Blocks without a run add nothing, wherever they stand; the position may lie behind the last run.
    steps.scatter_add_(-1, (ends - length).clamp(max=width - 1).long(), jump)
    if shift is not None:
        steps[..., 0] += shift[..., None]
    return PieceLists(steps.cumsum_(-1), ends[..., -1].contiguous())
