"""Ring: each rank keeps its queries, and the keys and values of all ranks pass by it."""

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
from omni_attn.parallel.strategy import ParallelMetadata, Strategy, Tokens
from omni_attn.parallel.views import OWN, View


class Ring(Strategy):
    """See the module."""

    mode: ClassVar[str] = "ring"
    needs_lse: ClassVar[bool] = True

    def __init__(self, request: AttentionRequest, parallel: Parallel) -> None:
        super().__init__(request, parallel)
        self.rounds = RingRounds(parallel.ring, request, self.local_heads[1])

    def geometries(self) -> dict[str, dict[str, Any]]:
        """See Strategy."""
        return self.rounds.geometries(super().geometries()[OWN])

    def describe(self) -> str:
        """See Strategy."""
        return self.rounds.describe()

    def views(
        self, record: AttentionMetadata, query: Shards, key: Shards, joint: JointTokens, rank: int
    ) -> Mapping[str, View]:
        """See Strategy."""
        return self.rounds.views(record, query, key, joint, rank)

    def attend(
        self, impls: Mapping[str, AttentionImpl], tokens: Tokens, metadata: ParallelMetadata
    ) -> Tensor:
        """See Strategy."""
        return self.rounds.attend(impls, tokens, metadata, metadata.key.sizes)
