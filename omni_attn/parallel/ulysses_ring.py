"""Ulysses around a ring: ranks of one group trade tokens for heads, then groups hand keys and values round.

Each rank of a Ulysses group holds the tokens of all of its group, and goes through the ring with its share of the heads
(the unified scheme of arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from omni_attn.backends.abstract import AttentionImpl
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.facts import AttentionRequest
from omni_attn.parallel.context import Parallel
from omni_attn.parallel.joint import JointTokens
from omni_attn.parallel.rounds import RingRounds
from omni_attn.parallel.shards import Shards
from omni_attn.parallel.strategy import ParallelMetadata, Tokens
from omni_attn.parallel.trade import Traded
from omni_attn.parallel.ulysses import Ulysses
from omni_attn.parallel.views import OWN, View


class UlyssesRing(Ulysses):
    """See the module."""

    mode: ClassVar[str] = "ulysses_ring"
    needs_lse: ClassVar[bool] = True

    def __init__(self, request: AttentionRequest, parallel: Parallel) -> None:
        super().__init__(request, parallel)
        kv_heads = max(end - start for start, end in self.trade.heads.key)
        self.rounds = RingRounds(parallel.ring, request, kv_heads)

    def geometries(self) -> dict[str, dict[str, Any]]:
        """See Strategy."""
        return self.rounds.geometries(super().geometries()[OWN])

    def describe(self) -> str:
        """See Strategy."""
        return f"{super().describe()}; {self.rounds.describe()}"

    def views(
        self, record: AttentionMetadata, query: Shards, key: Shards, joint: JointTokens, rank: int
    ) -> Mapping[str, View]:
        """See Strategy."""
        traders = self.trade.group.size
        place, heads = rank // traders, self.heads_of(rank)
        return self.rounds.views(record, query.joined(traders), key.joined(traders), joint, place, heads)

    def traded(self, shards: Shards) -> Traded:
        """See Ulysses."""
        traders = self.trade.group.size
        first = self.rounds.group.rank * traders
        return Traded(shards, slice(first, first + traders))

    def attend(
        self, impls: Mapping[str, AttentionImpl], tokens: Tokens, metadata: ParallelMetadata
    ) -> Tensor:
        """See Strategy."""
        return self.rounds.attend(impls, tokens, metadata, metadata.key.joined(self.trade.group.size).sizes)
