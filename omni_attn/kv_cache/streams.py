"""Which pages each stream holds, and in which order, as the host keeps it.

A stream is one video and guidance branch, or one sequence of text. Its row is [sink pages | window pages | chunk
pages]: forgetting is an edit of that row, never a copy of keys and values. A chunk is opened with `append`, written by
as many steps as it takes, each into the same slots, and becomes history with `commit`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count

from omni_attn.errors import KVCacheError, MetadataError
from omni_attn.kv_cache.pages import BlockPool


@dataclass
class StreamState:
    """Tokens of a stream: `dropped` ones are gone, `kept` ones are history, `chunk` ones are being made."""

    pages: list[int] = field(default_factory=list)
    dropped: int = 0
    kept: int = 0
    chunk: int = 0
    pages_version: int = 0
    version: int = 0


class StreamPages:
    """The pages of up to `max_reqs` streams.

    Args:
        pool: where pages come from; several tables may share one.
        block_size: tokens of a page.
        max_reqs: most streams.
        max_blocks: most pages of a stream.
        group: name of the KV-cache group, for error texts.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, max_reqs: int, max_blocks: int, *, group: str
    ) -> None:
        sizes = {"block_size": block_size, "max_reqs": max_reqs, "max_blocks": max_blocks}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size}: a block table needs at least 1")
        self.pool, self.block_size, self.group = pool, block_size, group
        self.max_reqs, self.max_blocks = max_reqs, max_blocks
        self._streams: dict[Hashable, StreamState] = {}
        self._versions = count(1)

    @property
    def streams(self) -> tuple[Hashable, ...]:
        """Streams in the order in which they came."""
        return tuple(self._streams)

    def add(self, stream: Hashable) -> None:
        """Takes up a stream without tokens.

        Raises:
            KVCacheError: it is here already, or there are `max_reqs`.
        """
        if stream in self._streams:
            raise KVCacheError(
                f"{self._name(stream)} is in the block table already. Remove it before it starts anew"
            )
        if len(self._streams) == self.max_reqs:
            raise KVCacheError(
                f"{self._name(stream)} finds the block table full: it has room for {self.max_reqs} streams. Remove "
                "those that have ended, or make the table with a larger max_reqs"
            )
        self._streams[stream] = StreamState()
        self._touch(self._streams[stream], pages=True)

    def remove(self, stream: Hashable) -> None:
        """Forgets a stream, and gives its pages back.

        Raises:
            KVCacheError: there is no such stream.
        """
        self.pool.give_back(self._state(stream).pages)
        del self._streams[stream]

    def append(self, stream: Hashable, tokens: int) -> None:
        """Opens a chunk of so many tokens behind the history, with pages for them.

        Raises:
            KVCacheError: a chunk is open, the row has no room for it, or the pool has too few pages; nothing changes.
            ValueError: there are no tokens.
        """
        state = self._state(stream)
        if tokens < 1:
            raise ValueError(f"{tokens} tokens for {self._name(stream)}: a chunk has at least 1")
        if state.chunk:
            raise KVCacheError(
                f"{self._name(stream)} has an open chunk of {state.chunk} tokens. Commit or discard it before the next"
            )
        needed = -(-(state.kept + tokens) // self.block_size)
        if needed > self.max_blocks:
            raise KVCacheError(
                f"{self._name(stream)} overflows its row: {state.kept} kept tokens and {tokens} new ones need {needed} "
                f"pages of {self.block_size}, and a row has {self.max_blocks}. Evict before appending, or make the "
                "table with a larger max_blocks"
            )
        if needed > len(state.pages):
            try:
                state.pages += self.pool.take(needed - len(state.pages))
            except KVCacheError as error:
                raise KVCacheError(f"{self._name(stream)}: {error}") from None
            self._touch(state, pages=True)
        state.chunk = tokens
        self._touch(state)

    def commit(self, stream: Hashable, tokens: int | None = None) -> None:
        """Makes the first `tokens` of the open chunk history, None = all; pages that are then empty go back.

        Raises:
            KVCacheError: no chunk is open, or it has fewer tokens.
        """
        state = self._state(stream)
        tokens = state.chunk if tokens is None else tokens
        if not state.chunk or not 0 <= tokens <= state.chunk:
            raise KVCacheError(
                f"{self._name(stream)} cannot commit {tokens} tokens: its open chunk has {state.chunk}. Append first"
            )
        state.kept += tokens
        state.chunk = 0
        used = -(-state.kept // self.block_size)
        if used < len(state.pages):
            self.pool.give_back(state.pages[used:])
            del state.pages[used:]
            self._touch(state, pages=True)
        self._touch(state)

    def discard(self, stream: Hashable) -> None:
        """Takes the open chunk back.

        Raises:
            KVCacheError: none is open.
        """
        self.commit(stream, 0)

    def evict(self, stream: Hashable, *, window: int, sink: int = 0, exact: bool = True) -> int:
        """Forgets the history between its first `sink` and its last `window` tokens, whole pages at a time.

        A window that counts the chunk as well is asked for less that chunk, before it is appended.

        Args:
            exact: both edges have to lie between pages; otherwise tokens on the edges' pages stay visible unless the
                kernel has a window of its own.

        Returns:
            Tokens that are gone now.

        Raises:
            KVCacheError: an edge lies within a page.
            ValueError: a size is negative.
        """
        state, size = self._state(stream), self.block_size
        if window < 0 or sink < 0:
            raise ValueError(f"window={window}, sink={sink}: needs both from 0 on")
        edge = state.kept - window
        if edge <= sink:
            return 0
        if exact and (sink % size or edge % size):
            raise KVCacheError(
                f"{self._name(stream)} cannot forget tokens {sink} to {edge} of its {state.kept}: pages hold {size} "
                "tokens, and an edge lies within one. Choose a kv_cache.block_size that divides sink, window and "
                "chunk, or round those to it"
            )
        gone = slice(-(-sink // size), edge // size)
        pages = state.pages[gone]
        if not pages:
            return 0
        self.pool.give_back(pages)
        del state.pages[gone]
        state.kept -= len(pages) * size
        state.dropped += len(pages) * size
        self._touch(state, pages=True)
        return len(pages) * size

    def kept(self, stream: Hashable) -> int:
        """Tokens of the history that the row still holds."""
        return self._state(stream).kept

    def chunk(self, stream: Hashable) -> int:
        """Tokens of the open chunk; 0 = none is open."""
        return self._state(stream).chunk

    def position(self, stream: Hashable) -> int:
        """Where the open or next chunk begins in the whole stream, forgotten tokens counted."""
        state = self._state(stream)
        return state.dropped + state.kept

    def pages(self, stream: Hashable) -> tuple[int, ...]:
        """Pages of a stream, in order."""
        return tuple(self._state(stream).pages)

    def version(self, streams: Sequence[Hashable]) -> tuple[int, ...]:
        """Equal to an earlier one only where these streams' pages and lengths are as they were then."""
        return tuple(state.version for state in self._batch(streams))

    def _name(self, stream: Hashable) -> str:
        return f"stream {stream!r} of group {self.group!r}"

    def _state(self, stream: Hashable) -> StreamState:
        if stream not in self._streams:
            raise KVCacheError(f"{self._name(stream)} is not in the block table. Add it first")
        return self._streams[stream]

    def _batch(self, streams: Sequence[Hashable]) -> list[StreamState]:
        if len(set(streams)) != len(streams):
            raise MetadataError(
                f"streams {list(streams)} of group {self.group!r}: one comes twice, and would write each of its slots "
                "twice in one step. Name each once"
            )
        return [self._state(stream) for stream in streams]

    def _touch(self, state: StreamState, *, pages: bool = False) -> None:
        state.version = next(self._versions)
        if pages:
            state.pages_version = state.version
