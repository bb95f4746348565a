"""The exchanges of a Ulysses group: tokens for heads, and back.

Shape letters: B batch, S tokens, H query heads, G key-value heads, D channels; X all that one token sends to one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from omni_attn.parallel.collectives import Collectives
from omni_attn.parallel.copies import copy_numbers, cut
from omni_attn.parallel.heads import HeadSplit
from omni_attn.parallel.outbox import Counts, Rows
from omni_attn.parallel.shards import Shards, Span


class _Part(NamedTuple):
    """A tensor [B, S, H, D] of this rank's tokens, and the heads of it that each rank gets."""

    tensor: Tensor
    spans: tuple[Span, ...]

    def width(self, rank: int) -> int:
        """Channels of one token that a rank gets."""
        start, end = self.spans[rank]
        return (end - start) * self.tensor.shape[3]

    def rows(self, ranks: range) -> Tensor:
        """What consecutive ranks get, each as many heads: [ranks, S, B, channels]."""
        start, end = self.spans[ranks[0]][0], self.spans[ranks[-1]][1]
        each = (len(ranks), (end - start) // len(ranks))
        heads: Tensor = self.tensor[:, :, start:end].unflatten(2, each)  # type: ignore[no-untyped-call]
        return heads.permute(2, 1, 0, 3, 4).flatten(3)


class Traded(NamedTuple):
    """Tokens of the ranks of one group, in what all ranks hold.

    Attributes:
        shards: of all ranks.
        ranks: of the group, which follow one another.
    """

    shards: Shards
    ranks: slice = slice(None)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank of the group."""
        return self.shards.sizes[self.ranks]

    @property
    def largest(self) -> int:
        """Tokens of the rank with the most, of any group."""
        return max(self.shards.sizes)


class HeadTrade:
    """The two exchanges of one layer.

    Args:
        group: ranks that trade.
        heads: who gets which.
    """

    def __init__(self, group: Collectives, heads: HeadSplit) -> None:
        self.group, self.heads = group, heads
        self.query_span: Span = heads.query[group.rank]
        self.key_span: Span = heads.key[group.rank]

    def own_heads(self, tensor_BSHD: Tensor, *, is_query: bool) -> Tensor:
        """This rank's heads of a tensor that every rank has, with query heads or with key-value heads."""
        start, end = self.query_span if is_query else self.key_span
        return (tensor_BSHD if is_query else self._repeat(tensor_BSHD))[:, :, start:end]

    def own_streams(self, joint: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's heads of joint_query, joint_key and joint_value."""
        return {
            name: self.own_heads(tensor, is_query=name == "joint_query") for name, tensor in joint.items()
        }

    def to_heads(
        self, query: Sequence[Tensor], key: Sequence[Tensor], queries: Traded, keys: Traded
    ) -> tuple[list[Tensor], list[Tensor]]:
        """All tokens, with this rank's heads, of tensors that have this rank's tokens and all heads: strided.

        Args: see start_to_heads.
        """
        return self.start_to_heads(query, key, queries, keys)()

    def start_to_heads(
        self, query: Sequence[Tensor], key: Sequence[Tensor], queries: Traded, keys: Traded
    ) -> Callable[[], tuple[list[Tensor], list[Tensor]]]:
        """Starts to_heads; the call waits for it. One exchange, or two where queries and keys are split differently.

        Args:
            query: tensors [B, S, H, D] with query heads.
            key: tensors [B, Sk, G, D] with key-value heads.
            queries, keys: tokens of the ranks.
        """
        parts = [_Part(tensor, self.heads.query) for tensor in query]
        key_parts = [_Part(self._repeat(tensor), self.heads.key) for tensor in key]
        # By what all ranks hold, so that other groups make as many exchanges.
        if queries.shards.sizes != keys.shards.sizes:
            first, second = self._start(parts, queries), self._start(key_parts, keys)
            return lambda: (first(), second())
        both, count = self._start([*parts, *key_parts], queries), len(parts)

        def arrived() -> tuple[list[Tensor], list[Tensor]]:
            found = both()
            return found[:count], found[count:]

        return arrived

    def to_tokens(self, output: Tensor, tokens: Traded, joint: int = 0, order: str = "front") -> Tensor:
        """This rank's tokens with all heads, from all tokens [B, Sq, H, D] with this rank's heads: contiguous.

        Args: see start_to_tokens.
        """
        return beside_one_another(self.start_to_tokens(output, tokens, joint, order)(), output.shape[3])

    def start_to_tokens(
        self, output: Tensor, tokens: Traded, joint: int = 0, order: str = "front"
    ) -> Callable[[], list[Tensor]]:
        """Starts to_tokens; the call waits, and gives this rank's tokens [S, B, X] with the heads of each rank.

        Args:
            output: joint tokens among them, before or behind the others as `order` says.
            tokens: of the ranks.
            joint: tokens that every rank gets.
        """
        batch, size, sizes = output.shape[0], output.shape[3], tokens.sizes
        rows = output.transpose(0, 1).flatten(2)  # [S, B, X]
        if joint:
            rows = _beside_each(rows, sizes, joint, in_front=order == "front")
        own = joint + sizes[self.group.rank]
        widths = [(end - start) * size for start, end in self.heads.query]
        send = [(joint + count) * batch * rows.shape[2] for count in sizes]
        receive = [own * batch * width for width in widths]
        counts = Counts(send, receive, (joint + tokens.largest) * batch * max(widths))
        pending = self.group.start_all_to_all(Rows(rows.reshape(-1), counts))

        def arrived() -> list[Tensor]:
            received = self.group.wait(pending).split_with_sizes(receive)
            return [part.view(own, batch, width) for part, width in zip(received, widths, strict=True)]

        return arrived

    def _repeat(self, tensor_BSGD: Tensor) -> Tensor:
        repeat = self.heads.repeat
        return tensor_BSGD if repeat == 1 else tensor_BSGD.repeat_interleave(repeat, dim=2)

    def _start(self, parts: Sequence[_Part], traded: Traded) -> Callable[[], list[Tensor]]:
        tensors, sizes = [part.tensor for part in parts], traded.sizes
        batch, own = tensors[0].shape[:2]
        widths = [[part.width(rank) for part in parts] for rank in range(self.group.size)]
        totals, mine = [sum(width) for width in widths], widths[self.group.rank]
        counts = Counts(
            [own * batch * total for total in totals],
            [size * batch * sum(mine) for size in sizes],
            traded.largest * batch * max(totals),
        )
        outbox = self.group.outbox(tensors, counts)
        # What one rank gets lies together, token by token, so that it need not sort what it receives.
        for width, alike in _alike(widths, parts[0].spans):
            for ranks, parcels in outbox.parcels(alike):
                tokens = parcels.view(len(ranks), own, batch, sum(width))
                for part, column in zip(parts, cut(tokens, width, dim=3), strict=True):
                    copy_numbers(part.rows(ranks), column)
        pending = self.group.start_all_to_all(outbox)

        def arrived() -> list[Tensor]:
            received = self.group.wait(pending).view(sum(sizes), batch, sum(mine))
            return [
                found.unflatten(2, (width // part.tensor.shape[3], part.tensor.shape[3])).transpose(0, 1)  # type: ignore[no-untyped-call]
                for found, part, width in zip(
                    received.split_with_sizes(mine, dim=2), parts, mine, strict=True
                )
            ]

        return arrived


def beside_one_another(parts: Sequence[Tensor], head_size: int) -> Tensor:
    """Tokens [B, S, H, D], contiguous, from some of their heads [S, B, X] after the other."""
    tokens: Tensor = torch.cat(list(parts), dim=2).unflatten(2, (-1, head_size))  # type: ignore[no-untyped-call]
    return tokens.transpose(0, 1).contiguous()


def _alike(widths: Sequence[list[int]], spans: Sequence[Span]) -> Iterator[tuple[list[int], range]]:
    """Consecutive ranks that get equally many heads, one's behind the other's: one copy serves them all."""
    start = 0
    for rank in range(1, len(widths) + 1):
        if rank == len(widths) or widths[rank] != widths[start] or spans[rank][0] != spans[rank - 1][1]:
            yield widths[start], range(start, rank)
            start = rank


def _beside_each(rows: Tensor, sizes: Sequence[int], joint: int, *, in_front: bool) -> Tensor:
    """Rows whose joint part, at one end, is repeated before or behind each rank's."""
    pieces = list(rows.split_with_sizes([joint, *sizes] if in_front else [*sizes, joint]))
    shared = pieces.pop(0 if in_front else -1)
    return torch.cat([part for own in pieces for part in ((shared, own) if in_front else (own, shared))])
