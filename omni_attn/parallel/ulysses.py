"""Ulysses: ranks trade tokens for heads, attend to the whole sequence with their own heads, and trade back.

DeepSpeed-Ulysses (arXiv 2309.14509). Queries, keys, values and the backend's own inputs travel in one exchange.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.facts import AttentionRequest
from omni_attn.parallel.collectives import how
from omni_attn.parallel.context import Parallel
from omni_attn.parallel.heads import split_heads
from omni_attn.parallel.joint import JointTokens
from omni_attn.parallel.shards import Shards, Span
from omni_attn.parallel.strategy import ParallelMetadata, Strategy, Tokens, check_inputs
from omni_attn.parallel.trade import HeadTrade, Traded
from omni_attn.parallel.views import OWN, View, view_record


class Ulysses(Strategy):
    """See the module."""

    mode: ClassVar[str] = "ulysses"

    def __init__(self, request: AttentionRequest, parallel: Parallel) -> None:
        super().__init__(request, parallel)
        heads, kv_heads = super().local_heads
        group, uneven = parallel.ulysses, parallel.config.uneven_heads
        self.trade = HeadTrade(
            group, split_heads(heads, kv_heads, group.size, role=request.role, uneven=uneven)
        )
        self.trades = [self.trade]

    @property
    def local_heads(self) -> tuple[int, int]:
        """See Strategy."""
        mine = self.trade.heads.counts(self.trade.group.rank)
        return mine if mine[0] else self.trade.heads.counts(0)

    def heads_of(self, rank: int) -> Span:
        """A rank's query heads; those of the first rank where it has none."""
        spans = self.trade.heads.query
        start, end = spans[rank % len(spans)]
        return (start, end) if end > start else spans[0]

    def describe(self) -> str:
        """See Strategy."""
        trade = self.trade
        counts = [end - start for start, end in trade.heads.query]
        each = str(counts[0]) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        pieces = len(self.trades)
        told = f", in {pieces} piece{'s' * (pieces > 1)}" if self.parallel.config.head_pieces > 1 else ""
        return (
            f"{trade.group.size} ranks trade tokens for heads, {each} of {self.request.num_heads} heads each"
            f"{how(trade.group)}{told}"
        )

    def views(
        self, record: AttentionMetadata, query: Shards, key: Shards, joint: JointTokens, rank: int
    ) -> Mapping[str, View]:
        """See Strategy."""
        lengths = (joint.query + query.total, joint.key + key.total)
        return {OWN: view_record(record, lengths, heads=self.heads_of(rank))}

    def traded(self, shards: Shards) -> Traded:
        """Tokens of the ranks that trade."""
        return Traded(shards)

    def pre_attention(self, tokens: Tokens, metadata: ParallelMetadata) -> Tokens:
        """See Strategy."""
        check_inputs(self.request, tokens.query, tokens.inputs)
        (query, *inputs), (key, value) = self.trade.to_heads(
            [tokens.query, *tokens.inputs.values()],
            [tokens.key, tokens.value],
            self.traded(metadata.query),
            self.traded(metadata.key),
        )
        named = dict(zip(tokens.inputs, inputs, strict=True))
        return Tokens(query, key, value, named, self.trade.own_streams(tokens.joint))

    def post_attention(self, output: Tensor, metadata: ParallelMetadata) -> Tensor:
        """See Strategy."""
        joint = metadata.joint
        return self.trade.to_tokens(output, self.traded(metadata.query), joint.query, joint.order)
