"""Ulysses in pieces: a rank's heads are exchanged some at a time, and one piece travels while another attends."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from omni_attn.backends.abstract import AttentionImpl
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.facts import AttentionRequest
from omni_attn.parallel.context import Parallel
from omni_attn.parallel.joint import JointTokens, join_streams
from omni_attn.parallel.shards import Shards
from omni_attn.parallel.strategy import ParallelMetadata, Tokens, check_inputs
from omni_attn.parallel.trade import HeadTrade, beside_one_another
from omni_attn.parallel.ulysses import Ulysses
from omni_attn.parallel.views import OWN, View, view_record


class UlyssesInPieces(Ulysses):
    """See the module. Where heads are not to be cut there is one piece, and Ulysses does it."""

    def __init__(self, request: AttentionRequest, parallel: Parallel) -> None:
        super().__init__(request, parallel)
        cut = self.trade.heads.cut(parallel.config.head_pieces)
        self.trades = [HeadTrade(parallel.ulysses, heads) for heads in cut]

    @property
    def local_heads(self) -> tuple[int, int]:
        """See Strategy; those of one piece."""
        heads, kv_heads = super().local_heads
        return heads // len(self.trades), kv_heads // len(self.trades)

    @property
    def key(self) -> tuple[object, ...]:
        """See Strategy."""
        return (*super().key, len(self.trades))

    def views(
        self, record: AttentionMetadata, query: Shards, key: Shards, joint: JointTokens, rank: int
    ) -> Mapping[str, View]:
        """See Strategy. A mask of its own for each head makes a view of its own for each piece."""
        lengths, mask = (joint.query + query.total, joint.key + key.total), record.attn_mask
        if mask is None or mask.dim() < 4 or mask.shape[1] == 1:
            view = view_record(record, lengths)
            return {str(number): view for number in range(len(self.trades))}
        return {
            str(number): view_record(record, lengths, heads=trade.heads.query[rank])
            for number, trade in enumerate(self.trades)
        }

    def pre_attention(self, tokens: Tokens, metadata: ParallelMetadata) -> Tokens:
        """See Strategy. Pieces are traded while attending."""
        return tokens

    def attend(
        self, impls: Mapping[str, AttentionImpl], tokens: Tokens, metadata: ParallelMetadata
    ) -> Tensor:
        """See Strategy."""
        check_inputs(self.request, tokens.query, tokens.inputs)
        joint, sizes = metadata.joint, self.traded(metadata.query)
        queries = [tokens.query, *tokens.inputs.values()]
        # All are on their way before the first kernel: what is launched behind a kernel that fills the device waits.
        coming = [
            trade.start_to_heads(queries, [tokens.key, tokens.value], sizes, self.traded(metadata.key))
            for trade in self.trades
        ]
        leaving = []
        for number, (trade, arrived) in enumerate(zip(self.trades, coming, strict=True)):
            (query, *inputs), (key, value) = arrived()
            beside = trade.own_streams(tokens.joint)
            query, key, value = join_streams(self.request, query, key, value, beside, joint.order)
            named = dict(zip(tokens.inputs, inputs, strict=True))
            output = impls[OWN].forward(query, key, value, metadata.products[str(number)], **named)
            leaving.append(trade.start_to_tokens(output, sizes, joint.query, joint.order))
        by_rank = zip(*(arrived() for arrived in leaving), strict=True)
        return beside_one_another([part for pieces in by_rank for part in pieces], tokens.value.shape[3])

    def post_attention(self, output: Tensor, metadata: ParallelMetadata) -> Tensor:
        """See Strategy. Pieces are traded back while attending."""
        return output
