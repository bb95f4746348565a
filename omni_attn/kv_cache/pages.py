"""Which pages of a KV cache are free."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from omni_attn.backends.paged import NULL_BLOCK
from omni_attn.errors import KVCacheError


class BlockPool:
    """The pages of a cache, shared by all tables that point into it. Block 0 is never given out.

    Lower numbers go first: pages of one stream then tend to lie side by side, which kernels read faster.

    Args:
        num_blocks: pages of the cache, block 0 included.

    Raises:
        ValueError: there is no page besides block 0.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks={num_blocks}: block {NULL_BLOCK} is never given out, so a pool needs at least 2"
            )
        self.num_blocks = num_blocks
        self._free = list(range(NULL_BLOCK + 1, num_blocks))  # sorted, and so a heap
        self._taken = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        """Pages that can be given out now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many pages, which are the caller's until it gives them back; all of them or none.

        Raises:
            KVCacheError: fewer are free.
        """
        if count > len(self._free):
            raise KVCacheError(
                f"{count} pages are needed, and {len(self._free)} of {self.num_blocks - 1} are free. Make a larger "
                "cache, remove streams that have ended, or keep a shorter window"
            )
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._taken[page] = 1
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """Makes pages free again; all of them or, where one may not be, none.

        Raises:
            KVCacheError: a page is not given out: it is free already, named twice, block 0, or no page of this pool.
        """
        pages, seen = list(pages), set[int]()
        for page in pages:
            if page in seen or not 0 <= page < self.num_blocks or not self._taken[page]:
                raise KVCacheError(
                    f"page {page} was given back, and is not given out: of this pool's pages 1 to "
                    f"{self.num_blocks - 1} each goes back once, by the stream that took it"
                )
            seen.add(page)
        for page in pages:
            self._taken[page] = 0
            heapq.heappush(self._free, page)
