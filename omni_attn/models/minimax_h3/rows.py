"""Which rows of the packed sequence a process computes: all of them, or its share of a sequence split over ranks.

Every rank is given the whole sequence and returns the whole; in between it embeds, transforms and projects its own
rows. What ranks exchange at the end are velocities, the narrowest tensors there are.

Shape letters: B batch, S rows of the packed sequence, O rows of this process, N rows of one kind, F what they come
with, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_attn.parallel.context import Parallel

Embed = Callable[[Tensor], Tensor]
Normalise = Callable[[Tensor, Tensor], Tensor]


class RowsHere(Protocol):
    """The rows of one call that this process computes."""

    def own(self, per_row: Tensor) -> Tensor:
        """This process's part [O, ...] of a tensor [S, ...]."""

    def pack(self, like: Tensor, kinds: Mapping[str, tuple[Tensor, Embed]]) -> Tensor:
        """Embedded rows of each kind at their places, [B, O, C]; zeros where no index points, as in padding.

        Args:
            like: gives batch, C, dtype and device.
            kinds: name -> rows [B, N, F] and what embeds them.
        """

    def unpack(
        self, packed_BOC: Tensor, times: Tensor, normalise: Normalise, heads: Mapping[str, nn.Linear]
    ) -> tuple[Tensor, ...]:
        """What each head makes of all rows of its kind, [B, N, F], on every rank.

        Args:
            times: [O], index of each row's timestep.
            normalise: of rows [B, N, C], given the indices of their timesteps [N].
            heads: by the kind that they read.
        """


class AllRows:
    """The whole sequence.

    Args:
        length: its rows.
        indices: kind -> places [N] of its rows, int64 on the model's device.
    """

    def __init__(self, length: int, indices: Mapping[str, Tensor]) -> None:
        self.length, self.indices = length, indices

    def own(self, per_row: Tensor) -> Tensor:
        """See RowsHere."""
        return per_row

    def pack(self, like: Tensor, kinds: Mapping[str, tuple[Tensor, Embed]]) -> Tensor:
        """See RowsHere."""
        packed_BSC = like.new_zeros(like.shape[0], self.length, like.shape[2])
        for kind, (rows, embed) in kinds.items():
            packed_BSC.index_copy_(1, self.indices[kind], embed(rows).to(like.dtype))
        return packed_BSC

    def unpack(
        self, packed_BOC: Tensor, times: Tensor, normalise: Normalise, heads: Mapping[str, nn.Linear]
    ) -> tuple[Tensor, ...]:
        """See RowsHere."""
        outputs = []
        for kind, head in heads.items():
            indices = self.indices[kind]
            normed = normalise(packed_BOC.index_select(1, indices), times.index_select(0, indices))
            outputs.append(head(normed.to(head.weight.dtype)))
        return tuple(outputs)


class SharedRows:
    """A rank's share of the sequence.

    Which kinds lie in it only the device knows. So each kind is embedded in as many rows as it has, or as the share
    has if those are fewer, and each row picks its own: no size depends on the indices.

    Args:
        parallel: the ranks.
        length, indices: see AllRows.
    """

    def __init__(self, parallel: Parallel, length: int, indices: Mapping[str, Tensor]) -> None:
        self.parallel, self.length, self.indices = parallel, length, indices
        self.start, end = parallel.shards(length).spans[parallel.rank]
        self.count = end - self.start
        self._number = {kind: self._numbers(places) for kind, places in indices.items() if places.shape[0]}

    def own(self, per_row: Tensor) -> Tensor:
        """See RowsHere."""
        return per_row.narrow(0, self.start, self.count)

    def pack(self, like: Tensor, kinds: Mapping[str, tuple[Tensor, Embed]]) -> Tensor:
        """See RowsHere."""
        packed_BOC = like.new_zeros(like.shape[0], self.count, like.shape[2])
        for kind, (rows, embed) in kinds.items():
            if kind not in self._number:
                continue
            number = self._number[kind]
            found = number.clamp(min=0)
            embedded = (
                embed(rows).index_select(1, found)
                if rows.shape[1] < self.count
                else embed(rows.index_select(1, found))
            )
            packed_BOC = torch.where((number >= 0)[:, None], embedded.to(like.dtype), packed_BOC)
        return packed_BOC

    def unpack(
        self, packed_BOC: Tensor, times: Tensor, normalise: Normalise, heads: Mapping[str, nn.Linear]
    ) -> tuple[Tensor, ...]:
        """See RowsHere. A row belongs to one kind, so the heads' outputs share its place in the exchange."""
        normed = normalise(packed_BOC, times)
        width = max(head.out_features for head in heads.values())
        joined: Tensor | None = None
        for kind, head in heads.items():
            made = F.pad(head(normed.to(head.weight.dtype)), (0, width - head.out_features))
            if joined is None:
                joined = made
            elif kind in self._number:
                joined = torch.where((self._number[kind] >= 0)[:, None], made, joined)
        assert joined is not None
        whole = self.parallel.gather(joined, self.length)
        return tuple(
            whole[..., : head.out_features].index_select(1, self.indices[kind]).to(head.weight.dtype)
            for kind, head in heads.items()
        )

    def _numbers(self, places: Tensor) -> Tensor:
        """For each own row which row of the kind it is, -1 = none: int64 [O]."""
        number = places.new_full((self.length,), -1)
        number.index_copy_(0, places, torch.arange(places.shape[0], device=places.device))
        return self.own(number)


def rows_here(parallel: Parallel | None, length: int, indices: Mapping[str, Tensor]) -> RowsHere:
    """The rows of a sequence that this process computes; see AllRows and SharedRows."""
    return AllRows(length, indices) if parallel is None else SharedRows(parallel, length, indices)
