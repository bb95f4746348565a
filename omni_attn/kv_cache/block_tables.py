"""Block tables and slots that a device reads, kept up to date by copies that nobody waits for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from omni_attn.backends.paged import NULL_BLOCK, PAD_SLOT
from omni_attn.errors import KVCacheError
from omni_attn.kv_cache.pages import BlockPool
from omni_attn.kv_cache.slots import slots_of
from omni_attn.kv_cache.staging import copy_to_device
from omni_attn.kv_cache.streams import StreamPages


class BlockTable(StreamPages):
    """The pages of up to `max_reqs` streams, on the host, and on the device where kernels read them.

    The tensors on the device keep their addresses, so that a CUDA graph can read them; what `block_table` and
    `slot_mapping` give are views of them, valid until the next call.

    Args:
        pool: where pages come from; several tables may share one.
        block_size: tokens of a page.
        max_reqs: most streams.
        max_blocks: most pages of a stream.
        device: of the tensors that kernels read.
        group: name of the KV-cache group, for error texts.
        max_tokens: most tokens that one step writes; None = as many as the streams can hold.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_reqs: int,
        max_blocks: int,
        device: torch.device | str,
        *,
        group: str = "self",
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(pool, block_size, max_reqs, max_blocks, group=group)
        self.max_tokens = max_reqs * max_blocks * block_size if max_tokens is None else max_tokens
        self.device = torch.device(device)
        self._rows = torch.full((max_reqs, max_blocks), NULL_BLOCK, dtype=torch.int32)
        self._slots = torch.full((self.max_tokens,), PAD_SLOT, dtype=torch.int64)
        self._rows_there = torch.full_like(self._rows, NULL_BLOCK, device=self.device)
        self._slots_there = torch.full_like(self._slots, PAD_SLOT, device=self.device)
        self._shown_rows = [0] * max_reqs  # the version of the pages that each row holds; 0 = of none
        self._shown_slots: tuple[int, ...] = ()
        self._num_slots = 0

    def block_table(self, streams: Sequence[Hashable]) -> torch.Tensor:
        """Pages of these streams, a row each: int32 [R, W] on the device, NULL_BLOCK behind them and in later rows."""
        wanted = [state.pages_version for state in self._batch(streams)]
        wanted += [0] * (self.max_reqs - len(wanted))
        changed = [row for row, version in enumerate(wanted) if version != self._shown_rows[row]]
        for row in changed:
            pages = self._streams[streams[row]].pages if wanted[row] else []
            self._rows[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            self._rows[row, len(pages) :] = NULL_BLOCK
        if changed:
            rows = slice(changed[0], changed[-1] + 1)
            copy_to_device(self._rows[rows], self._rows_there[rows])
            self._shown_rows = wanted
        return self._rows_there[: len(streams)]

    def slot_mapping(self, streams: Sequence[Hashable]) -> torch.Tensor:
        """Slots of these streams' open chunks, one behind the other: int64 [T] on the device, -1 behind them.

        Raises:
            KVCacheError: more tokens than `max_tokens`.
        """
        states, version = self._batch(streams), self.version(streams)
        if version != self._shown_slots:
            first, chunk = torch.tensor([[s.kept for s in states], [s.chunk for s in states]]).unbind()
            total = int(chunk.sum())
            if total > self.max_tokens:
                raise KVCacheError(
                    f"group {self.group!r}: a step of {total} tokens was asked for, and the block table was made for "
                    f"{self.max_tokens}. Make it with a larger max_tokens, or run fewer streams at once"
                )
            self.block_table(streams)
            self._slots[:total] = slots_of(self._rows, first, chunk, self.block_size)
            self._slots[total : self._num_slots] = PAD_SLOT
            written = slice(0, max(total, self._num_slots))
            copy_to_device(self._slots[written], self._slots_there[written])
            self._shown_slots, self._num_slots = version, total
        return self._slots_there[: self._num_slots]
