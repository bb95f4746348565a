"""How the kernels of latent attention are cut: tiles by shape and memory, splits of the keys by what fills a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from omni_attn.ops.layout import multiprocessors, shared_memory
from omni_attn.ops.paged.plan import choose_splits
from omni_attn.ops.tiles import first_fitting, padded

__all__ = ["LatentPlan", "MLATile", "padded", "plan_decode", "prefill_tile"]


class MLATile(NamedTuple):
    """Rows of a program (heads of a decode, queries of a prefill), keys of one step, warps, pipeline stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class LatentPlan(NamedTuple):
    """The cut of a step's decodes."""

    tile: MLATile
    splits: int


# By registers for sm_90 at 512 + 64 channels (see benchmarks/notes/2026-11-30-mla.md): 64 rows have none spilled, and
# 32 rows, which Hopper's wide products do not take, more than 16 have.
_DECODE = (
    MLATile(64, 32, 8, 3),
    MLATile(64, 32, 8, 2),
    MLATile(64, 16, 8, 2),
    MLATile(32, 16, 4, 2),
    MLATile(16, 16, 4, 1),
)
_NARROW = (
    MLATile(16, 64, 8, 3),
    MLATile(16, 32, 8, 3),
    MLATile(16, 32, 8, 2),
    MLATile(16, 16, 8, 2),
    MLATile(16, 16, 4, 1),
)
_PREFILL = (
    MLATile(128, 64, 8, 3),
    MLATile(128, 64, 8, 2),
    MLATile(64, 64, 4, 2),
    MLATile(64, 32, 4, 2),
    MLATile(32, 32, 4, 1),
    MLATile(16, 16, 4, 1),
)


@lru_cache(maxsize=256)
def plan_decode(
    *,
    num_rows: int,
    max_seq_len: int,
    heads: int,
    latent: int,
    rope: int,
    item_bytes: int,
    shared_memory: int,
    num_sms: int,
) -> LatentPlan:
    """The plan of a step's decodes, from what the host knows.

    Args:
        item_bytes: 4 for float32, else 2.
        shared_memory: bytes that one program may use; num_sms: multiprocessors of the GPU.
    """
    channels = padded(latent) + padded(rope)
    # A step of keys is also the step of values, which Blackwell holds once more.
    size = _Sizes(row=channels, step=channels, beside=padded(latent), item_bytes=item_bytes)
    tile = first_fitting(_DECODE if heads > 16 else _NARROW, size.bytes_of, shared_memory)
    resident = max(1, min(2, shared_memory // size.bytes_of(tile)))
    splits = choose_splits(
        num_rows * -(-heads // tile.rows),
        rows=num_rows * heads,
        steps=-(-max_seq_len // tile.keys),
        num_sms=num_sms,
        resident=resident,
    )
    return LatentPlan(tile, splits)


def plan_decode_on(
    device: torch.device,
    *,
    num_rows: int,
    max_seq_len: int,
    heads: int,
    latent: int,
    rope: int,
    item_bytes: int,
) -> LatentPlan:
    """plan_decode for a device."""
    return plan_decode(
        num_rows=num_rows,
        max_seq_len=max_seq_len,
        heads=heads,
        latent=latent,
        rope=rope,
        item_bytes=item_bytes,
        shared_memory=shared_memory(device),
        num_sms=multiprocessors(device),
    )


@lru_cache(maxsize=64)
def prefill_tile(
    max_query_len: int, nope: int, rope: int, value: int, item_bytes: int, shared_memory: int
) -> MLATile:
    """The tile of attention in the open form."""
    key = padded(nope) + padded(rope)
    size = _Sizes(row=key, step=key + padded(value), beside=0, item_bytes=item_bytes)
    tile = first_fitting(_PREFILL, size.bytes_of, shared_memory)
    return tile._replace(rows=min(tile.rows, padded(max_query_len)))


class _Sizes(NamedTuple):
    """Channels of a row of queries and of a key's share in a step, and of what a step's keys take beside them."""

    row: int
    step: int
    beside: int
    item_bytes: int

    def bytes_of(self, tile: MLATile) -> int:
        """Shared memory; float32 as two TF32 parts."""
        each = tile.num_stages * self.step + self.beside
        if tile.rows < 64 and tile.num_stages > 2 and self.item_bytes == 2:
            # Small products read a stage into registers before the next one is fetched, and need nothing beside.
            each = (tile.num_stages - 1) * self.step
        elements = tile.rows * self.row + tile.keys * each
        return elements * (8 if self.item_bytes == 4 else 2) + 4096
