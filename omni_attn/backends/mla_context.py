"""Earlier tokens of prefills, in chunks that a workspace holds: their keys and values are made of latents in turns.

A long prompt that comes in parts attends to all that came before. Made at once, keys and values of every head would
take far more memory than the latents do, so they are made for one chunk of earlier tokens after the other, and what the
chunks give is merged by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from omni_attn.backends.paged import NULL_BLOCK
from omni_attn.ops.layout import int32_on
from omni_attn.ops.mla.bounds import RaggedBounds

MOST_ROWS = 1 << 16
"""Rows of a workspace, however many and long the requests are."""


def workspace_rows(max_model_len: int, max_reqs: int, block_size: int) -> int:
    """Rows of latents brought together at once: a few whole streams, a few pages of each, and at most MOST_ROWS."""
    wanted = min(max(8 * max_model_len, 4 * max_reqs * block_size), MOST_ROWS)
    return -(-wanted // block_size) * block_size


class ChunkPlan(NamedTuple):
    """What one chunk holds: for each request from `first` on, from where, and how many of its earlier tokens."""

    first: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]


def plan_chunks(context_lens: Sequence[int], rows: int, block_size: int) -> tuple[ChunkPlan, ...]:
    """Packs the earlier tokens of requests, in order, into chunks of at most `rows`.

    A request is cut between pages alone, and only the first one of a chunk goes on from the chunk before.

    Raises:
        ValueError: a chunk cannot hold one page.
    """
    if rows < block_size:
        raise ValueError(
            f"a workspace of {rows} rows and pages of {block_size} tokens: it has to hold at least one page"
        )
    plans: list[ChunkPlan] = []
    starts: list[int] = []
    lengths: list[int] = []
    first, left = 0, rows
    for request, context in enumerate(context_lens):
        begin = 0
        while begin < context:
            take = context - begin
            if take > left:
                take = left - left % block_size
            if take:
                first = first if starts else request
                while first + len(starts) < request:  # those between have no earlier tokens
                    starts.append(0)
                    lengths.append(0)
                starts.append(begin)
                lengths.append(take)
                begin, left = begin + take, left - take
            if begin < context:
                plans.append(ChunkPlan(first, tuple(starts), tuple(lengths)))
                starts, lengths, left = [], [], rows
    if starts:
        plans.append(ChunkPlan(first, tuple(starts), tuple(lengths)))
    return tuple(plans)


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextChunk:
    """One chunk of a step.

    Attributes:
        tokens: from and up to which prefill token it is attended from.
        bounds: of those tokens, and of the chunk's rows.
        requests, positions, used: int64 and bool [rows], whose token a row is, of all prefills, which one, and whether
            it exists (the host may have stated an upper bound).
        pages, places: int64 [rows], where it lies.
    """

    tokens: tuple[int, int]
    bounds: RaggedBounds
    requests: torch.Tensor
    positions: torch.Tensor
    used: torch.Tensor
    pages: torch.Tensor
    places: torch.Tensor

    def located(self, block_table: torch.Tensor, block_size: int) -> ContextChunk:
        """The same in the pages of another table [prefills, W]."""
        column = (self.positions // block_size).clamp(max=block_table.shape[1] - 1)
        pages = block_table[self.requests, column].long().masked_fill(~self.used, NULL_BLOCK)
        return replace(self, pages=pages)


def make_chunk(
    plan: ChunkPlan,
    query_starts: Sequence[int],
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> ContextChunk:
    """A planned chunk on the device, without waiting for it.

    Args:
        query_starts, query_start_loc: of all prefills, from 0, on the host and on the device.
        context_lens: int32 on the device, earlier tokens of each prefill.
        block_table: of all prefills.
    """
    device, end = query_start_loc.device, plan.first + len(plan.starts)
    members = slice(plan.first, end)
    key_starts = (0, *accumulate(plan.lengths))
    offsets, lengths = int32_on(device, plan.starts), int32_on(device, plan.lengths)
    key_lens = (context_lens[members] - offsets).clamp(min=0).minimum(lengths)
    key_start_loc = int32_on(device, key_starts)
    member = torch.repeat_interleave(
        torch.arange(len(plan.starts), device=device), lengths, output_size=key_starts[-1]
    )
    within = torch.arange(key_starts[-1], device=device) - key_start_loc[member]
    positions = within + offsets[member]
    own = query_starts[plan.first : end + 1]
    chunk = ContextChunk(
        tokens=(own[0], own[-1]),
        bounds=RaggedBounds(
            query_start_loc=query_start_loc[plan.first : end + 1] - own[0],
            query_starts=tuple(start - own[0] for start in own),
            key_start_loc=key_start_loc,
            key_starts=key_starts,
            key_lens=key_lens,
            max_query_len=max(end - start for start, end in pairwise(own)),
        ),
        requests=member + plan.first,
        positions=positions,
        used=within < key_lens[member],
        pages=positions,
        places=positions % block_size,
    )
    return chunk.located(block_table, block_size)
