"""What ranks exchange: a thin protocol, what is made of it, and groups without processes.

All tensors are exchanged along their first dimension. Calls are differentiable, and traced by torch.compile.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol, Self

import torch
from torch import Tensor

from omni_attn.errors import MetadataError
from omni_attn.parallel.copies import copy_numbers, cut
from omni_attn.parallel.outbox import Counts, Outbox, Rows

Pending = Any
"""What a group started; its `wait` makes a tensor of it, and nothing else may be done with it before."""


class Collectives(Protocol):
    """One group of ranks, seen from one of them."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    @property
    def rank(self) -> int:
        """This rank's place in it."""

    @property
    def way(self) -> str:
        """How exchanges travel, for a person; empty where that needs no word."""

    def outbox(self, sources: Sequence[Tensor], counts: Counts) -> Outbox:
        """Where the numbers that an exchange sends are best laid.

        Args:
            sources: tensors that it will be filled from, of one dtype and device.
            counts: of single numbers.
        """

    def start_all_to_all(self, outbox: Outbox) -> Pending:
        """Starts to send each rank its parcel.

        Args:
            outbox: of this group, or Rows; nobody writes into it any more.

        Returns:
            What `wait` makes [sum(receive), ...], rows of rank 0 first.
        """

    def start_all_gather(self, rows: Tensor) -> Pending:
        """Starts to send all rows, of which every rank has as many, to all ranks.

        Args:
            rows: [rows, ...], contiguous.

        Returns:
            What `wait` makes [size * rows, ...], those of rank 0 first.
        """

    def wait(self, pending: Pending) -> Tensor:
        """The rows, once they are there; on a GPU the current stream waits, and the host does not."""

    def share_counts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The counts of every rank, on the host, for which every rank waits."""


def all_gather(group: Collectives, rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """The rows of all ranks, [sum(sizes), ...], those of rank 0 first; `sizes` says how many each has.

    Unequal pieces are padded to the longest and cut again: libraries know how to spread equal ones over the links
    between hosts, each link once, which sending one's rows to every other rank does not.
    """
    longest = max(sizes)
    lacking = longest - rows.shape[0]
    if longest == 0:
        return rows
    padded = rows if not lacking else torch.cat((rows, rows.new_zeros((lacking, *rows.shape[1:]))))
    gathered = group.wait(group.start_all_gather(padded))
    if min(sizes) == longest:
        return gathered
    pieces = gathered.view(group.size, longest, *rows.shape[1:]).unbind()
    return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])


def from_first(group: Collectives, tensor: Tensor) -> Tensor:
    """The first rank's tensor, of which every rank has one of the same shape and dtype, on every rank."""
    count = tensor.numel()
    sent, rows = (
        (count, tensor.flatten().repeat(group.size)) if group.rank == 0 else (0, tensor.flatten()[:0])
    )
    send, receive = [sent] * group.size, [count, *[0] * (group.size - 1)]
    return group.wait(group.start_all_to_all(Rows(rows, Counts(send, receive)))).view(tensor.shape)


def start_shift(group: Collectives, tensors: Sequence[Tensor], receive: int, largest: int) -> Pending:
    """Starts to send tensors to the rank before this one, and to receive from the one behind; see `wait`.

    Args:
        tensors: their numbers travel as [N], one tensor's behind the other's.
        receive: numbers.
        largest: see Counts.
    """
    send, take = [0] * group.size, [0] * group.size
    before, behind = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    send[before], take[behind] = sum(tensor.numel() for tensor in tensors), receive
    counts = Counts(send, take, largest, to_one=True)
    if len(tensors) == 1:
        return group.start_all_to_all(Rows(tensors[0].flatten(), counts))
    outbox = group.outbox(tensors, counts)
    for _, parcels in outbox.parcels(range(before, before + 1)):
        places = cut(parcels[0], [tensor.numel() for tensor in tensors])
        for place, tensor in zip(places, tensors, strict=True):
            copy_numbers(tensor, place.view(tensor.shape))
    return group.start_all_to_all(outbox)


def tied(output: Tensor, *beside: Tensor) -> Tensor:
    """The output, whose backward pass goes through these tensors too, with zeros.

    For what came in an exchange and may have no part in this rank's result, since it is hidden, or behind the end of a
    packed sequence: a rank that left out an exchange's backward pass would keep the other ranks waiting.
    """
    if not torch.is_grad_enabled():
        return output
    nothing = [tensor.flatten()[:0].sum() for tensor in beside if tensor.requires_grad]
    return output + torch.stack(nothing).sum() if nothing else output


def how(group: Collectives) -> str:
    """The way of a group's exchanges as the end of a sentence."""
    return f", {group.way}" if group.way else ""


class Connected:
    """What stands for connections of this process: copies of a model share it, and no file can hold it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError(
            "A layer built inside use_parallel holds the connections of its process, which cannot be stored or sent. "
            "Save state_dict(), and build the model anew where it is read"
        )


class Group(Connected):
    """A group that sends what lies in one tensor."""

    way: str = ""

    def outbox(self, sources: Sequence[Tensor], counts: Counts) -> Outbox:
        """See Collectives."""
        return Rows(sources[0].new_empty(sum(counts.send)), counts)


class LoneCollectives(Group):
    """The one rank of a group of one, which sends to itself."""

    size, rank = 1, 0

    def start_all_to_all(self, outbox: Outbox) -> Pending:
        """See Collectives."""
        assert isinstance(outbox, Rows)
        rows, (send, receive, *_) = outbox
        assert list(send) == list(receive) == [rows.shape[0]], f"{rows.shape[0]} rows, sent as {list(send)}"
        return rows

    def start_all_gather(self, rows: Tensor) -> Pending:
        """See Collectives."""
        return rows

    def wait(self, pending: Pending) -> Tensor:
        """See Collectives."""
        arrived: Tensor = pending
        return arrived

    def share_counts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """See Collectives."""
        return (tuple(counts),)


class PlannedCollectives(Connected):
    """The first of so many ranks that nobody connected: every exchange is a MetadataError."""

    rank, way = 0, ""

    def __init__(self, size: int) -> None:
        self.size = size

    def _refuse(self, *asked: Any, **named: Any) -> NoReturn:
        raise MetadataError(
            f"a sequence split over {self.size} ranks was planned, and no processes are connected: start them with "
            "torchrun and build the model inside use_parallel(connect(config))"
        )

    outbox = start_all_to_all = start_all_gather = wait = share_counts = _refuse
