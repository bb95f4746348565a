"""Rules by which kernels are cut into tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Tile = TypeVar("Tile")


def padded(size: int) -> int:
    """The next power of two that a product takes."""
    return 1 << (max(16, size) - 1).bit_length()


def first_fitting(tiles: Sequence[Tile], bytes_of: Callable[[Tile], int], shared_memory: int) -> Tile:
    """The first tile that needs no more shared memory than there is; the last one if all of them do."""
    return next((tile for tile in tiles if bytes_of(tile) <= shared_memory), tiles[-1])
