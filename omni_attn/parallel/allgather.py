"""AllGather-KV: every rank gathers the keys and values of all tokens, and attends from its own queries.

Needs no log-sum-exp and no heads to share, and costs memory: a layer holds all keys and values for the time of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.parallel.collectives import all_gather
from omni_attn.parallel.joint import JointTokens
from omni_attn.parallel.shards import Shards, Span
from omni_attn.parallel.strategy import ParallelMetadata, Strategy, Tokens
from omni_attn.parallel.views import OWN, View, places, view_record


class AllGatherKV(Strategy):
    """See the module."""

    mode: ClassVar[str] = "allgather_kv"

    def describe(self) -> str:
        """See Strategy."""
        return f"{self.parallel.everyone.size} ranks gather all keys and values, and attend from their own tokens"

    def views(
        self, record: AttentionMetadata, query: Shards, key: Shards, joint: JointTokens, rank: int
    ) -> Mapping[str, View]:
        """See Strategy."""
        lengths, span = (joint.query + query.total, joint.key + key.total), query.spans[rank]
        queries = places(span, joint.query, joint.order, query.total)
        keys = ((0, self._last_key(record, lengths, span)),)
        view = view_record(record, lengths, query=queries, key=keys)
        return {} if 0 in view.lengths else {OWN: view}

    def _last_key(self, record: AttentionMetadata, lengths: tuple[int, int], span: Span) -> int:
        """How many keys queries of the span see: in a causal layer those up to its end, which aligns the two."""
        if not self.request.causal:
            return lengths[1]
        num_queries, num_keys = lengths
        if record.packed_padding is not None:
            num_queries, num_keys = record.packed_padding.q_length, record.packed_padding.kv_length
        if record.cu_seqlens_q is not None:
            _check_boundaries(record)
            num_queries = num_keys
        return min(max(span[1] + num_keys - num_queries, 0), lengths[1])

    def pre_attention(self, tokens: Tokens, metadata: ParallelMetadata) -> Tokens:
        """See Strategy."""
        key, value = self._gather(tokens.key, tokens.value, metadata.key.sizes)
        return tokens._replace(key=key, value=value)

    def _gather(self, key: Tensor, value: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys [B, S, G, D] and values [B, S, G, Dv] of all ranks, from this one's, in one exchange: strided."""
        parts = (key, value)
        rows = torch.cat([part.transpose(0, 1).flatten(2) for part in parts], dim=2)  # [S, B, G * (D + Dv)]
        columns = all_gather(self.parallel.everyone, rows, sizes).split_with_sizes(
            [part.shape[2] * part.shape[3] for part in parts], dim=2
        )
        keys, values = (
            column.unflatten(2, part.shape[2:]).transpose(0, 1)  # type: ignore[no-untyped-call]
            for column, part in zip(columns, parts, strict=True)
        )
        return keys, values


def _check_boundaries(record: AttentionMetadata) -> None:
    """Where queries and keys are bounded alike, the key after the last query of a span is the one to stop at."""
    first, second = record.cu_seqlens_q, record.cu_seqlens_k
    alike = isinstance(first, tuple) and isinstance(second, tuple) and first == second
    if not (second is None or second is first or alike):
        raise MetadataError(
            "causal packed sequences whose keys have boundaries of their own (cu_seqlens_k): gathered keys "
            "cannot be cut by them. Leave cu_seqlens_k out where it equals cu_seqlens_q, or use ulysses_degree instead"
        )
