"""The rounds of a ring: keys and values travel from rank to rank, and each shard's attention is merged as it passes.

Ring attention (arXiv 2310.01889), with the parts merged by their log-sum-exps. In round n a rank holds the shard of the
rank n places behind it; the next one travels while the kernel works on this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from omni_attn.backends.abstract import AttentionImpl
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest
from omni_attn.parallel.collectives import Collectives, how, start_shift, tied
from omni_attn.parallel.joint import JointTokens, join_streams
from omni_attn.parallel.parts import Part, merge_part
from omni_attn.parallel.shards import Shards, Span, count_tokens
from omni_attn.parallel.strategy import ParallelMetadata, Tokens
from omni_attn.parallel.views import OWN, View, places, view_record

_PLACED_FIELDS = frozenset({"attn_mask", "cu_seqlens_q", "packed_padding"})
"""What makes calls of equal lengths differ by where their tokens lie."""


class RingRounds:
    """All rounds of one layer on one rank.

    Args:
        group: ranks that hand keys and values round.
        request: of the layer.
        kv_heads: of the rank with the most, of any ring.
    """

    def __init__(self, group: Collectives, request: AttentionRequest, kv_heads: int) -> None:
        self.group, self.request, self.kv_heads = group, request, kv_heads

    def geometries(self, own: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The local impls by name, see Strategy.geometries; `own` are the keywords of the layer's."""
        return {OWN: own, "full": own | {"causal": False}} if self.request.causal else {OWN: own}

    def describe(self) -> str:
        """For a person."""
        seen = "the keys before its own tokens" if self.request.causal else "all keys"
        return f"{self.group.size} ranks hand keys and values round, each attends to {seen} in turn{how(self.group)}"

    def impl_of(self, shard: int, rank: int) -> str:
        """The impl that attends to a shard: in a causal layer all keys of an earlier one are seen by every query."""
        return "full" if self.request.causal and shard != rank else OWN

    def views(
        self,
        record: AttentionMetadata,
        query: Shards,
        key: Shards,
        joint: JointTokens,
        rank: int,
        heads: Span | None = None,
    ) -> Mapping[str, View]:
        """What is prepared for each shard with something to compute, by the number of its rank.

        Calls that differ in nothing share one view, so that a long ring does not prepare each round anew.

        Args:
            query, key: tokens of each rank of the group.
            rank: of the group.
            heads: of the record that the rank attends with; None = all.

        Raises:
            MetadataError: causal attention whose queries and keys are not split alike, or packed alike; see also
                view_record.
        """
        self._check_causal(record, query, key, joint.key)
        causal = self.request.causal
        queries = places(query.spans[rank], joint.query, joint.order, query.total)
        lengths = (joint.query + query.total, joint.key + key.total)
        is_placed = bool(record.stated & _PLACED_FIELDS)
        views: dict[str, View] = {}
        alike: dict[tuple[str, tuple[int, int]], View] = {}
        for shard in range(rank + 1 if causal else self.group.size):
            # Joint keys are seen once, in the round of the own shard.
            is_own = shard == rank
            keys = places(key.spans[shard], joint.key, joint.order, key.total, with_joint=is_own)
            sizes = (count_tokens(queries), count_tokens(keys))
            if 0 in sizes:
                continue
            name = self.impl_of(shard, rank)
            view = None if is_placed else alike.get((name, sizes))
            if view is None:
                made = view_record(record, lengths, query=queries, key=keys, heads=heads)
                view = alike[name, sizes] = made._replace(impl=name)
            views[str(shard)] = view
        return views

    def attend(
        self,
        impls: Mapping[str, AttentionImpl],
        tokens: Tokens,
        metadata: ParallelMetadata,
        sizes: Sequence[int],
    ) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks.

        Args:
            tokens: this rank's, and joint streams with the heads of its query and key; a rank without heads takes
                part in the exchanges alone.
            metadata: whose products were made from `views`.
            sizes: key tokens of each rank.

        Returns:
            [B, Jq + Sq, H, Dv], contiguous; zeros for rows that see no key.
        """
        products, (key, value) = metadata.products, (tokens.key, tokens.value)
        if not tokens.query.shape[2]:
            products = {}
        query, *near = join_streams(
            self.request, tokens.query, key, value, tokens.joint, metadata.joint.order
        )
        rank, ranks = self.group.rank, self.group.size
        held: tuple[Tensor, ...] = (key, value)
        largest = key.shape[0] * max(sizes) * self.kv_heads * (key.shape[3] + value.shape[3])
        merged: Part | None = None
        passed: list[Tensor] = []
        done = 0
        for shard in (number % ranks for number in range(rank, rank + ranks)):
            behind = (shard + 1) % ranks
            coming = None
            if behind != rank:
                coming = start_shift(self.group, held, _numbers(key, value, sizes[behind]), largest)
            product = products.get(str(shard))
            if product is not None:
                keys, values = near if shard == rank else _unpack(held[0], key, value, sizes[shard])
                part = impls[self.impl_of(shard, rank)].forward_with_lse(query, keys, values, product)
                done += 1
                merged = merge_part(merged, part, is_last=done == len(products))
            # What has no gradient is let go once it has passed by.
            passed += [tensor for tensor in held if tensor.requires_grad]
            if coming is not None:
                held = (self.group.wait(coming),)
        output = query.new_zeros(*query.shape[:3], value.shape[3]) if merged is None else merged[0]
        return tied(output, *passed)

    def _check_causal(self, record: AttentionMetadata, query: Shards, key: Shards, joint_keys: int) -> None:
        if not self.request.causal:
            return
        instead = "Set ulysses_degree alone"
        if query.sizes != key.sizes:
            raise MetadataError(
                "causal attention in a ring needs queries and keys split alike, found "
                f"{query.sizes} and {key.sizes} tokens on its ranks. {instead}"
            )
        padding = record.packed_padding
        if padding is not None and padding.q_length != padding.kv_length - joint_keys:
            raise MetadataError(
                f"causal attention in a ring needs as many used queries as keys, found {padding} and {joint_keys} "
                f"joint keys. {instead}"
            )
        first, second = record.cu_seqlens_q, record.cu_seqlens_k
        if second is None or second is first:
            return
        if isinstance(first, Tensor) or isinstance(second, Tensor) or first != second:
            raise MetadataError(
                "causal attention in a ring needs queries and keys packed alike: leave out cu_seqlens_k, or state both "
                f"as equal tuples of ints. {instead}"
            )


def _numbers(key: Tensor, value: Tensor, tokens: int) -> int:
    """Numbers in the keys and values of so many tokens."""
    return key.shape[0] * tokens * key.shape[2] * (key.shape[3] + value.shape[3])


def _unpack(held: Tensor, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Keys [B, S, G, D] and values [B, S, G, Dv] of a shard, shaped as this rank's, in what travelled."""
    shapes = [(tensor.shape[0], tokens, *tensor.shape[2:]) for tensor in (key, value)]
    middle = key.shape[0] * tokens * key.shape[2] * key.shape[3]
    return held[:middle].view(shapes[0]), held[middle:].view(shapes[1])
