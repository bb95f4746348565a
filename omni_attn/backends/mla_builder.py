"""From a step to the metadata of latent attention: decodes and prefills apart, once per step or chunk."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from itertools import pairwise
from typing import Any, ClassVar

import torch

from omni_attn.backends.mla import DecodeRows, MLAMetadata, MLASizes, PrefillRows
from omni_attn.backends.mla_context import MOST_ROWS, make_chunk, plan_chunks, workspace_rows
from omni_attn.backends.paged import CommonAttentionMetadata, PagedMetadataBuilder
from omni_attn.backends.paged_split import Split, split_decodes_and_prefills
from omni_attn.errors import MetadataError
from omni_attn.ops.mla.bounds import RaggedBounds


class QueryLens(Enum):
    """What forward_mqa takes: one token of each request, as many of each, or any number of each."""

    SINGLE_ONLY = "single"
    UNIFORM = "uniform"
    VARLEN = "varlen"


class MLAMetadataBuilder(PagedMetadataBuilder):
    """Splits a step in decodes and prefills. A captured graph holds decodes alone.

    Args:
        sizes: of the layers.
        decode_threshold: most new tokens of a request that count as decode.
        non_causal_blocks: the layers take steps that are not causal: blocks of equal length, whose tokens see one
            another and all that came before.
        workspace: rows of earlier latents that are opened at once, a multiple of the page size.

    Raises:
        ValueError: a threshold below 1, or above it for a kernel that takes single tokens.
    """

    supports_update_block_table: ClassVar[bool] = True
    query_lens: ClassVar[QueryLens] = QueryLens.VARLEN

    def __init__(
        self,
        *,
        sizes: MLASizes,
        decode_threshold: int = 1,
        non_causal_blocks: bool = False,
        workspace: int | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        if decode_threshold < 1 or (decode_threshold > 1 and self.query_lens is QueryLens.SINGLE_ONLY):
            able = "1" if self.query_lens is QueryLens.SINGLE_ONLY else "at least 1"
            raise ValueError(f"decode_threshold={decode_threshold}: {type(self).__name__} needs {able}")
        self.sizes, self.non_causal_blocks = sizes, non_causal_blocks
        self.reorder_batch_threshold: int = decode_threshold
        size = self.kv_cache_spec.block_size
        self.workspace = (
            workspace_rows(MOST_ROWS, 1, size) if workspace is None else -(-workspace // size) * size
        )

    def build(self, common: CommonAttentionMetadata) -> MLAMetadata:
        """See PagedMetadataBuilder.build.

        Raises:
            MetadataError: causality by request; or a step that is not causal, of layers that were not built for it or
                with queries of unequal lengths; or prefills whose key lengths only the device knows.
        """
        split = self._split(common)
        real = int(common.query_start_loc_cpu[-1])
        decode = self._decode(common, split) if split.num_decodes and split.num_decode_tokens else None
        prefill = self._prefill(common, split) if split.num_prefills else None
        assert split.num_decodes + split.num_prefills == common.num_reqs
        assert split.num_decode_tokens + split.num_prefill_tokens == common.num_actual_tokens
        return MLAMetadata(
            split=split,
            num_tokens=split.num_decode_tokens if split.num_decodes and not split.num_prefills else real,
            slot_mapping=common.slot_mapping,
            decode=decode,
            prefill=prefill,
        )

    def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> MLAMetadata:
        """See PagedMetadataBuilder; chunks of a prefill are cut on the host, so a graph holds decodes alone.

        Raises:
            MetadataError: the step has requests of more tokens than decodes have.
        """
        threshold = self.reorder_batch_threshold
        if common.causal is True and common.max_query_len > threshold:
            raise MetadataError(
                f"a CUDA graph of a step whose requests have up to {common.max_query_len} tokens: latent attention is "
                f"captured for decodes, of at most {threshold} -- capture such steps, or state decode_threshold="
            )
        built: MLAMetadata = super().build_for_cudagraph_capture(common)
        return built

    def update_block_table(
        self, metadata: MLAMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor | None
    ) -> MLAMetadata:
        """See PagedMetadataBuilder.update_block_table."""
        decode, prefill, first = metadata.decode, metadata.prefill, metadata.split.num_decodes
        if decode is not None:
            decode = replace(decode, block_table=block_table[:first])
        if prefill is not None:
            size, table = self.kv_cache_spec.block_size, block_table[first:]
            prefill = replace(prefill, chunks=tuple(c.located(table, size) for c in prefill.chunks))
        return replace(metadata, slot_mapping=slot_mapping, decode=decode, prefill=prefill)

    def plan_decode(self, num_rows: int, max_seq_len: int) -> Any:
        """What the kernel makes of the sizes of the decodes, from host numbers alone."""
        return None

    def _split(self, common: CommonAttentionMetadata) -> Split:
        if isinstance(common.causal, torch.Tensor):
            raise MetadataError(
                f"layers {', '.join(self.layer_names)}: causal and non-causal requests in one batch, and latent "
                "attention takes one bool for all: split the batch"
            )
        if not common.causal:
            self._check_block(common)
            return Split(common.num_reqs, 0, common.num_actual_tokens, 0)
        return split_decodes_and_prefills(
            common, self.reorder_batch_threshold, require_uniform=self.query_lens is not QueryLens.VARLEN
        )

    def _check_block(self, common: CommonAttentionMetadata) -> None:
        names = ", ".join(self.layer_names)
        if not self.non_causal_blocks:
            raise MetadataError(
                f"layers {names}: the step is not causal, and they were not built for that: state "
                "non_causal_blocks=True when they are built"
            )
        lengths = [end - start for start, end in pairwise(common.query_start_loc_cpu.tolist())]
        active = [length for length in lengths if length]
        if len(set(active)) > 1 or any(lengths[len(active) :]):
            raise MetadataError(
                f"layers {names}: a step of latent attention that is not causal needs blocks of equal length, with "
                f"padding behind them alone, found query lengths {lengths}"
            )
        if self.query_lens is QueryLens.SINGLE_ONLY and max(active, default=0) > 1:
            raise MetadataError(
                f"layers {names}: blocks of {max(active)} tokens, and the kernel takes single ones: choose another "
                "backend"
            )

    def _decode(self, common: CommonAttentionMetadata, split: Split) -> DecodeRows:
        rows, device = split.num_decode_tokens, common.query_start_loc.device
        starts = common.query_start_loc[: split.num_decodes + 1]
        token = torch.arange(rows, device=device, dtype=torch.int32)
        request = torch.searchsorted(starts[1:].contiguous(), token, right=True, out_int32=True)
        request = request.clamp(max=split.num_decodes - 1)
        lengths = common.seq_lens[request]
        if common.causal:
            lengths = (lengths - (starts[request + 1] - 1 - token)).clamp(min=0)
        lengths = lengths.masked_fill(token >= starts[-1], 0)
        return DecodeRows(
            block_table=common.block_table[: split.num_decodes],
            row_requests=self.stage("row_requests", request.int()),
            row_lens=self.stage("row_lens", lengths.int()),
            max_seq_len=common.max_seq_len,
            plan=self.plan_decode(rows, common.max_seq_len),
        )

    def _prefill(self, common: CommonAttentionMetadata, split: Split) -> PrefillRows:
        first, size = split.num_decodes, self.kv_cache_spec.block_size
        starts = [start - split.num_decode_tokens for start in common.query_start_loc_cpu[first:].tolist()]
        start_loc = common.query_start_loc[first:] - split.num_decode_tokens
        query_lens = [end - start for start, end in pairwise(starts)]
        if common.seq_lens_cpu is None:
            raise MetadataError(
                f"layers {', '.join(self.layer_names)}: {split.num_prefills} prefills, and the step says key lengths "
                "on the device only: state seq_lens_cpu, from which chunks of earlier tokens are cut"
            )
        total = common.seq_lens_cpu[first:].tolist()
        context = [max(0, keys - own) for keys, own in zip(total, query_lens, strict=True)]
        context_lens = (common.seq_lens[first:] - start_loc.diff()).clamp(min=0)
        table = common.block_table[first:]
        chunks = (
            make_chunk(plan, starts, start_loc, context_lens, table, size)
            for plan in plan_chunks(context, self.workspace, size)
        )
        own = RaggedBounds(
            query_start_loc=start_loc,
            query_starts=tuple(starts),
            key_start_loc=start_loc,
            key_starts=tuple(starts),
            key_lens=start_loc.diff(),
            max_query_len=max(query_lens),
        )
        return PrefillRows(own=own, chunks=tuple(chunks))
