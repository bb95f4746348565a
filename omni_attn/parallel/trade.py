"""The exchanges of a Ulysses group: tokens for heads, and back.

Shape letters: B batch, S tokens, H query heads, G key-value heads, D channels; X all that one token sends to one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from omni_attn.parallel.collectives import Collectives
from omni_attn.parallel.heads import HeadSplit
from omni_attn.parallel.shards import Span


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
        self, query: Sequence[Tensor], key: Sequence[Tensor], sizes: Sequence[int], key_sizes: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """All tokens, with this rank's heads, of tensors that have this rank's tokens and all heads: strided.

        Args: see start_to_heads.
        """
        return self.start_to_heads(query, key, sizes, key_sizes)()

    def start_to_heads(
        self, query: Sequence[Tensor], key: Sequence[Tensor], sizes: Sequence[int], key_sizes: Sequence[int]
    ) -> Callable[[], tuple[list[Tensor], list[Tensor]]]:
        """Starts to_heads; the call waits for it. One exchange, or two where queries and keys are split differently.

        Args:
            query: tensors [B, S, H, D] with query heads.
            key: tensors [B, Sk, G, D] with key-value heads.
            sizes, key_sizes: tokens of each rank.
        """
        queries = [_Part(tensor, self.heads.query) for tensor in query]
        keys = [_Part(self._repeat(tensor), self.heads.key) for tensor in key]
        if tuple(sizes) != tuple(key_sizes):
            first, second = self._start(queries, sizes), self._start(keys, key_sizes)
            return lambda: (first(), second())
        both, count = self._start([*queries, *keys], sizes), len(queries)

        def arrived() -> tuple[list[Tensor], list[Tensor]]:
            found = both()
            return found[:count], found[count:]

        return arrived

    def to_tokens(self, output: Tensor, sizes: Sequence[int], joint: int = 0, order: str = "front") -> Tensor:
        """This rank's tokens with all heads, from all tokens [B, Sq, H, D] with this rank's heads: contiguous.

        Args: see start_to_tokens.
        """
        return beside_one_another(self.start_to_tokens(output, sizes, joint, order)(), output.shape[3])

    def start_to_tokens(
        self, output: Tensor, sizes: Sequence[int], joint: int = 0, order: str = "front"
    ) -> Callable[[], list[Tensor]]:
        """Starts to_tokens; the call waits, and gives this rank's tokens [S, B, X] with the heads of each rank.

        Args:
            output: joint tokens among them, before or behind the others as `order` says.
            sizes: tokens of each rank.
            joint: tokens that every rank gets.
        """
        batch, size = output.shape[0], output.shape[3]
        rows = output.transpose(0, 1).flatten(2)  # [S, B, X]
        if joint:
            rows = _beside_each(rows, sizes, joint, in_front=order == "front")
        own = joint + sizes[self.group.rank]
        widths = [(end - start) * size for start, end in self.heads.query]
        send = [(joint + count) * batch * rows.shape[2] for count in sizes]
        receive = [own * batch * width for width in widths]
        pending = self.group.start_all_to_all(rows.reshape(-1), send, receive)

        def arrived() -> list[Tensor]:
            received = self.group.wait(pending).split_with_sizes(receive)
            return [part.view(own, batch, width) for part, width in zip(received, widths, strict=True)]

        return arrived

    def _repeat(self, tensor_BSGD: Tensor) -> Tensor:
        repeat = self.heads.repeat
        return tensor_BSGD if repeat == 1 else tensor_BSGD.repeat_interleave(repeat, dim=2)

    def _start(self, parts: Sequence[_Part], sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
        first = parts[0].tensor
        batch, own = first.shape[:2]
        widths = [[part.width(rank) for part in parts] for rank in range(self.group.size)]
        send = [own * batch * sum(width) for width in widths]
        rows = first.new_empty(sum(send))
        # What one rank gets lies together, token by token, so that it need not sort what it receives.
        start = 0
        for width, ranks in _alike(widths, parts[0].spans):
            end = start + sum(send[rank] for rank in ranks)
            parcels = rows[start:end].view(len(ranks), own, batch, sum(width))
            column = 0
            for part, channels in zip(parts, width, strict=True):
                parcels.narrow(3, column, channels).copy_(part.rows(ranks))
                column += channels
            start = end
        mine = widths[self.group.rank]
        pending = self.group.start_all_to_all(rows, send, [size * batch * sum(mine) for size in sizes])

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
