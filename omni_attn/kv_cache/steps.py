"""What a step looks like, from the block table of its KV-cache group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.kv_cache.block_tables import BlockTable
from omni_attn.kv_cache.staging import copy_to_device


class StepInputs:
    """Makes the common metadata of steps over one block table.

    As long as nothing changes (all denoising steps of a chunk), the same object is given again and nothing is copied.
    Its tensors on the device keep their addresses, and hold what the last call asked for.

    Args:
        table: of the KV-cache group.
    """

    def __init__(self, table: BlockTable) -> None:
        self.table = table
        most = table.max_reqs
        self._there = torch.zeros(2 * most + 1, dtype=torch.int32, device=table.device)
        self._key: tuple[object, ...] | None = None
        self._common: CommonAttentionMetadata | None = None

    def common(
        self,
        streams: Sequence[Hashable],
        *,
        causal: bool | torch.Tensor = True,
        query_lens: Sequence[int] | None = None,
        write: bool = True,
        prefilling: Sequence[bool] | None = None,
    ) -> CommonAttentionMetadata:
        """The step of these streams, in this order.

        Args:
            causal: see CommonAttentionMetadata.
            query_lens: query tokens of each stream; None = those of its open chunk. Others read the cache alone, as
                cross-attention does.
            write: the step writes the open chunks.
            prefilling: of each stream, whether its prompt is not yet complete.

        Raises:
            MetadataError: no stream or one twice, per-request causal of another kind, or a written chunk that is not
                what is queried.
            KVCacheError: a stream is not in the table, or the step has too many tokens.
        """
        chunks = [self.table.chunk(stream) for stream in streams]
        lens = chunks if query_lens is None else list(query_lens)
        self._check(streams, chunks, lens, write, causal, prefilling)
        stated = None if prefilling is None else tuple(prefilling)
        key = (
            self.table.version(streams),
            tuple(lens),
            write,
            stated,
            causal if isinstance(causal, bool) else id(causal),
        )
        # Nobody counts what happens to a tensor of inference mode.
        uncounted = isinstance(causal, torch.Tensor) and causal.is_inference()
        if self._common is None or key != self._key or uncounted:
            self._common = self._describe(streams, chunks, lens, causal, write, prefilling)
            self._key = key  # the object kept holds `causal`, so that its id is not given to another tensor
        else:
            self._stage(streams, write)  # the table may have shown other streams since
        return self._common

    def _stage(self, streams: Sequence[Hashable], write: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Block table and slots on the device; copies what is not there already."""
        slots = self.table.slot_mapping(streams) if write else None
        return self.table.block_table(streams), slots

    def _describe(
        self,
        streams: Sequence[Hashable],
        chunks: Sequence[int],
        lens: Sequence[int],
        causal: bool | torch.Tensor,
        write: bool,
        prefilling: Sequence[bool] | None,
    ) -> CommonAttentionMetadata:
        most, num_reqs = self.table.max_reqs, len(streams)
        keys = [self.table.kept(stream) + chunk for stream, chunk in zip(streams, chunks, strict=True)]
        host = torch.zeros(2 * most + 1, dtype=torch.int32)
        host[1 : num_reqs + 1] = torch.tensor(lens).cumsum(0)
        host[num_reqs + 1 : most + 1] = host[num_reqs]  # padded requests have no query
        host[most + 1 : most + 1 + num_reqs] = torch.tensor(keys)
        block_table, slots = self._stage(streams, write)
        copy_to_device(host, self._there)
        starts, ends = slice(0, num_reqs + 1), slice(most + 1, most + 1 + num_reqs)
        return CommonAttentionMetadata(
            query_start_loc=self._there[starts],
            query_start_loc_cpu=host[starts],
            seq_lens=self._there[ends],
            seq_lens_cpu=host[ends],
            num_reqs=num_reqs,
            num_actual_tokens=sum(lens),
            max_query_len=max(lens),
            max_seq_len=max(keys),
            block_table=block_table,
            slot_mapping=slots,
            causal=causal,
            is_prefilling=None if prefilling is None else torch.tensor(list(prefilling)),
        )

    def _check(
        self,
        streams: Sequence[Hashable],
        chunks: Sequence[int],
        lens: Sequence[int],
        write: bool,
        causal: bool | torch.Tensor,
        prefilling: Sequence[bool] | None,
    ) -> None:
        if not streams:
            raise MetadataError(f"group {self.table.group!r}: a step without streams was asked for. Skip it")
        for name, stated in {"query_lens": lens, "prefilling": prefilling}.items():
            if stated is not None and len(stated) != len(streams):
                raise MetadataError(
                    f"{name} has {len(stated)} entries for {len(streams)} streams. Give one of each"
                )
        if min(lens) < 0:
            raise MetadataError(f"query_lens={list(lens)}: a stream has 0 or more query tokens")
        if write and list(lens) != list(chunks):
            raise MetadataError(
                f"query_lens={list(lens)}, and the open chunks have {list(chunks)} tokens: a step that writes queries "
                "what it writes. Say write=False, or leave query_lens out"
            )
        if isinstance(causal, torch.Tensor) and (causal.dtype, causal.shape) != (
            torch.int32,
            (len(streams),),
        ):
            raise MetadataError(
                f"causal is {causal.dtype} {list(causal.shape)}: one of each request needs torch.int32 [{len(streams)}]"
            )
