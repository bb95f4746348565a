"""Ways to bring query, key and value into the order of a Ulysses exchange: what trade.py does, and what it could do.

A rank's tensors [B, S, H, D] become one run of bytes for each other rank, [ranks, S, B, 3, H / ranks, D]; what comes
back, [ranks, S, H / ranks, D], becomes [B, S, H, D]. Either way every byte is read once and written once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.parallel_calls import Work
from benchmarks.parallel_ranks import StillCollectives
from benchmarks.rounds import FLUSHES, shuffled_rounds
from benchmarks.tables import markdown_table
from omni_attn.parallel.heads import split_heads
from omni_attn.parallel.shards import Shards
from omni_attn.parallel.trade import HeadTrade, Traded
from omni_attn.tuning.clocks import clock_for

Tensors = list[torch.Tensor]


def packing_table(work: Work, device: torch.device, ranks: int, rounds: int, seed: int) -> str:
    """Milliseconds and bytes per second of each way, for one rank's tokens of an attention call."""
    sizes = Shards.even(work.tokens, ranks).sizes
    generator = torch.Generator(device).manual_seed(seed)
    shape = (1, sizes[0], work.heads, work.head_size)
    tensors = [torch.randn(shape, device=device, dtype=work.dtype, generator=generator) for _ in range(3)]
    ways = _ways(tensors, ranks, sizes)
    clock, times = clock_for(device, FLUSHES), dict[str, list[float]]()
    for _, (name, (call, _)) in shuffled_rounds(ways.items(), rounds, seed):
        times.setdefault(name, []).append(clock.milliseconds(call))
    lines = []
    for name, (_, moved) in ways.items():
        ms = statistics.median(times[name])
        lines.append((name, f"{ms:.3f}", f"{moved / 1e6:.0f}", f"{moved / ms / 1e9:.2f}"))
    return markdown_table(("way", "ms", "MB read and written", "TB/s"), lines)


def _ways(
    tensors: Tensors, ranks: int, sizes: tuple[int, ...]
) -> dict[str, tuple[Callable[[], torch.Tensor], int]]:
    """Calls by name, with the bytes that each moves."""
    query, key, value = tensors
    heads = query.shape[2]
    trade = HeadTrade(StillCollectives(ranks), split_heads(heads, heads, ranks, role="packing"))
    tokens = Traded(Shards(sizes))
    one = query.numel() * query.element_size()
    first, end = trade.query_span
    output = query.new_ones((1, sum(sizes), end - first, query.shape[3]))
    found: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
        "plain copy of the three, one kernel each": (partial(_plain, tensors), 6 * one),
        "trade.py, query, key and value": (
            lambda: trade.to_heads([query], [key, value], tokens, tokens)[0][0],
            6 * one,
        ),
        "trade.py, output": (lambda: trade.to_tokens(output, tokens), 2 * one),
    }
    if heads % ranks == 0:
        found |= {
            "one copy for each tensor and rank": (partial(_by_rank_and_tensor, tensors, ranks), 6 * one),
            "one copy for each tensor, words of 8 bytes": (partial(_by_words, tensors, ranks), 6 * one),
            "one concatenation": (partial(_concatenated, tensors, ranks), 6 * one),
        }
    return found


def _plain(tensors: Tensors) -> torch.Tensor:
    return [tensor.clone() for tensor in tensors][-1]


def _by_rank(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """[B, S, H, D] seen as [ranks, S, B, channels of a rank]."""
    by_rank: torch.Tensor = tensor.unflatten(2, (ranks, -1))  # type: ignore[no-untyped-call]
    return by_rank.flatten(3).permute(2, 1, 0, 3)


def _by_tensor(tensors: Tensors, ranks: int) -> torch.Tensor:
    parts = [_by_rank(tensor, ranks) for tensor in tensors]
    rows = parts[0].new_empty((*parts[0].shape[:3], len(parts), parts[0].shape[3]))
    for number, part in enumerate(parts):
        rows[..., number, :].copy_(part)
    return rows


def _by_rank_and_tensor(tensors: Tensors, ranks: int) -> torch.Tensor:
    parts = [_by_rank(tensor, ranks) for tensor in tensors]
    rows = parts[0].new_empty((*parts[0].shape[:3], len(parts), parts[0].shape[3]))
    for rank in range(ranks):
        for number, part in enumerate(parts):
            rows[rank, ..., number, :].copy_(part[rank])
    return rows


def _by_words(tensors: Tensors, ranks: int) -> torch.Tensor:
    return _by_tensor([tensor.view(torch.int64) for tensor in tensors], ranks)


def _concatenated(tensors: Tensors, ranks: int) -> torch.Tensor:
    return torch.cat([_by_rank(tensor, ranks) for tensor in tensors], dim=-1)
