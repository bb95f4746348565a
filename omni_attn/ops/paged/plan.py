"""How the paged attention kernel is cut: tiles by shape and memory, splits of the keys by what fills a GPU."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from omni_attn.ops.layout import multiprocessors, shared_memory
from omni_attn.ops.tiles import first_fitting, padded


class Tile(NamedTuple):
    """Rows of a program (query tokens times their grouped heads), keys of one step, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, head_size: int, item_bytes: int) -> int:
        """Shared memory of the query rows and of the stages of key and value; float32 as two TF32 parts."""
        # Small products read a stage into registers before the next one is fetched: one buffer less.
        stages = self.num_stages if self.block_m >= 64 else max(1, self.num_stages - 1)
        elements = (self.block_m + 2 * stages * self.block_n) * head_size
        return elements * (8 if item_bytes == 4 else 2) + 2048


class Plan(NamedTuple):
    """The cut of one step.

    Attributes:
        num_tiles: programs over rows; tiles_each: of every request, 0 = they differ.
        splits: parts of the keys.
        gathered: the pages of each request are first brought together, in so many tokens; 0 = they are not.
    """

    tile: Tile
    num_tiles: int
    tiles_each: int
    splits: int
    gathered: int = 0


# Two of the first fit a Hopper SM at head size 128, and three of the first decode tile (see benchmarks/notes,
# 2026-11-30-paged.md).
_PREFILL = (
    Tile(64, 64, 4, 3),
    Tile(64, 32, 4, 3),
    Tile(64, 32, 4, 2),
    Tile(32, 32, 4, 2),
    Tile(16, 16, 4, 1),
)
_DECODE = (Tile(16, 64, 4, 3), Tile(16, 32, 4, 3), Tile(16, 32, 4, 2), Tile(16, 16, 4, 1))
_MAX_SPLITS = 32
_LEAST_STEPS = 4
"""Steps of a split: fewer are not worth its start."""
# In steps of one program: its start and end; a merge, and what it reads and writes for one row of one split.
_START, _MERGE, _MERGE_ROW = 3.0, 3.0, 2e-4
_GATHER_ROWS = 1024
"""Rows of a request from which on its pages are brought together: a copy of its keys and values for faster fetches."""
_GATHER_BYTES = 2**31
"""Most memory that this may take."""
_WORTH = 0.97
"""A split has to save 3 %: it takes memory."""


@lru_cache(maxsize=256)
def plan_step(
    *,
    num_tokens: int,
    num_reqs: int,
    max_query_len: int,
    max_seq_len: int,
    ratio: int,
    num_kv_heads: int,
    head_size: int,
    item_bytes: int,
    shared_memory: int,
    num_sms: int,
    page_size: int = 0,
    invariant: bool = False,
) -> Plan:
    """The plan of a step, from what the host knows of it.

    Args:
        ratio: query heads of a kv head.
        item_bytes: 4 for float32, else 2.
        shared_memory: bytes that one program may use, about what a multiprocessor has.
        num_sms: multiprocessors of the GPU.
        page_size: tokens of a page; 0 = they are not to be brought together.
        invariant: the order of a request's sums may not depend on the batch around it: one tile for all, no splits.
    """
    size = padded(head_size)
    tile = choose_tile(None if invariant else max_query_len * ratio, size, item_bytes, shared_memory)
    each = -(-max_query_len * ratio // tile.block_m)
    mixed = num_tokens * ratio // tile.block_m + num_reqs
    tiles_each = each if each * num_reqs <= mixed else 0
    tiles = each * num_reqs if tiles_each else mixed
    splits = 1
    if not invariant:
        splits = choose_splits(
            tiles * num_kv_heads,
            rows=num_tokens * ratio * num_kv_heads,
            steps=-(-max_seq_len // tile.block_n),
            num_sms=num_sms,
            resident=max(1, min(4, shared_memory // tile.shared_bytes(size, item_bytes))),
        )
    gathered = 0
    if page_size % tile.block_n and max_query_len * ratio >= _GATHER_ROWS and not invariant:
        tokens = max(
            tile.block_n, 1 << max(0, max_seq_len - 1).bit_length()
        )  # few lengths: a kernel is compiled for each
        fits = num_reqs * tokens * 2 * num_kv_heads * head_size * item_bytes <= _GATHER_BYTES
        gathered = tokens if fits else 0
    return Plan(tile, tiles, tiles_each, splits, gathered)


def plan_on(
    device: torch.device,
    *,
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
    windowed: bool,
    **step: Any,
) -> Plan:
    """plan_step for a device; `step` has the rest of its arguments."""
    return plan_step(
        ratio=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        shared_memory=shared_memory(device),
        num_sms=multiprocessors(device),
        # A window sees a part of the keys: bringing all of them together would not pay.
        page_size=0 if windowed else page_size,
        **step,
    )


def choose_tile(rows: int | None, head_size: int, item_bytes: int, shared_memory: int) -> Tile:
    """The first tile that fits the shared memory, of those for so many rows of a request; None = any number."""
    tiles = _PREFILL if rows is None or rows > 16 else _DECODE
    tile = first_fitting(tiles, lambda tile: tile.shared_bytes(head_size, item_bytes), shared_memory)
    if rows is None:
        return tile
    return tile._replace(block_m=min(tile.block_m, padded(rows)))


@lru_cache(maxsize=256)
def choose_splits(programs: int, *, rows: int, steps: int, num_sms: int, resident: int) -> int:
    """Into how many parts the keys are cut, so that a GPU is done first.

    A multiprocessor runs `resident` programs of equal length at once, and fewer in its last wave, which is shorter
    then, but not by as much. Splits even that out; each costs a start, and together they cost a merge.

    Args:
        programs: without splits; rows: of outputs, T * H; steps: of one program.
    """

    def time(splits: int) -> float:
        waves, rest = divmod(-(-programs * splits // num_sms), resident)
        merge = _MERGE + _MERGE_ROW * rows * splits if splits > 1 else 0.0
        return (waves + math.pow(rest / resident, 0.6)) * (-(-steps // splits) + _START) + merge

    counts = range(1, max(1, min(_MAX_SPLITS, steps // _LEAST_STEPS)) + 1)
    best = min(time(count) for count in counts)
    return next(count for count in counts if time(count) * _WORTH <= best)
