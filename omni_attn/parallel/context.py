"""The processes that share a sequence, as the layers and models constructed among them see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from omni_attn.config.parallel import ParallelConfig
from omni_attn.errors import MetadataError
from omni_attn.facts.request import SequenceParallel
from omni_attn.parallel.collectives import Collectives, Connected, PlannedCollectives, all_gather
from omni_attn.parallel.shards import Shards


@dataclass(frozen=True, eq=False)
class Parallel(Connected):
    """One rank's place among those that share a sequence.

    Ranks are numbered so that those of one Ulysses group follow one another: rank = ring place * ulysses_degree +
    Ulysses place. Each holds the piece of the sequence by its number.

    Attributes:
        config: the degrees.
        everyone: all ranks.
        ulysses, ring: the ranks that trade heads, and those that hand keys and values round.
    """

    config: ParallelConfig
    everyone: Collectives
    ulysses: Collectives
    ring: Collectives

    @classmethod
    def planned(cls, config: ParallelConfig) -> Parallel:
        """The first rank of a configuration that nobody connected: layers are built and selected, and cannot run."""
        groups = (PlannedCollectives(n) for n in (config.size, config.ulysses_degree, config.ring_degree))
        return cls(config, *groups)

    @property
    def mode(self) -> SequenceParallel | None:
        """What a layer's request states; None where nothing is split."""
        return self.config.mode

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.everyone.rank

    def shards(self, total: int) -> Shards:
        """Which of so many tokens each rank holds."""
        return Shards.even(total, self.config.size)

    def split(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a tensor that holds the whole sequence along `dim`: a view."""
        start, end = self.shards(tensor.shape[dim]).spans[self.rank]
        return tensor.narrow(dim, start, end - start)

    def gather(self, tensor: Tensor, total: int, dim: int = 1) -> Tensor:
        """The whole sequence of `total` tokens along `dim`, of which this rank holds its piece; on every rank.

        Raises:
            MetadataError: the piece is not this rank's share of `total`.
        """
        shards = self.shards(total)
        if tensor.shape[dim] != shards.sizes[self.rank]:
            raise MetadataError(
                f"rank {self.rank} holds {tensor.shape[dim]} of {total} tokens, and its share is "
                f"{shards.sizes[self.rank]}: split the whole sequence with `split`"
            )
        rows = tensor.movedim(dim, 0).contiguous()
        return all_gather(self.everyone, rows, shards.sizes).movedim(0, dim)


_parallel: ContextVar[Parallel | None] = ContextVar("omni_attn_parallel", default=None)


def current_parallel() -> Parallel | None:
    """What models and layers constructed here are split over; None = nothing is split."""
    return _parallel.get()


@contextmanager
def use_parallel(parallel: Parallel | ParallelConfig | None) -> Iterator[Parallel | None]:
    """Attention layers and models constructed inside split their sequence this way; nothing reads it in forward.

    Args:
        parallel: what `connect` gave; a configuration alone plans it: layers state their mode, and cannot run.
    """
    used = Parallel.planned(parallel) if isinstance(parallel, ParallelConfig) else parallel
    if used is not None and used.mode is None:
        used = None
    token = _parallel.set(used)
    try:
        yield used
    finally:
        _parallel.reset(token)
