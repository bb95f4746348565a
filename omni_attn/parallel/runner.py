"""The strategy around a layer's impl and builder, as an impl and a builder: what the layer itself calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from omni_attn.backends.abstract import AttentionImpl, AttentionMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import read_record
from omni_attn.errors import MetadataError
from omni_attn.parallel.collectives import tied
from omni_attn.parallel.joint import JointTokens, split_joint
from omni_attn.parallel.shards import Shards
from omni_attn.parallel.strategy import ParallelMetadata, Strategy, Tokens
from omni_attn.parallel.views import OWN, View, in_key_order

_JOINT_FIELDS = frozenset({"joint_tokens", "joint_order"})


class ParallelBuilder:
    """Prepares the local impls for each of their calls.

    Args:
        strategy: how the layer is split.
        builders: of the local impls, by name.
    """

    def __init__(self, strategy: Strategy, builders: Mapping[str, AttentionMetadataBuilder]) -> None:
        self.strategy, self.builders = strategy, builders

    @property
    def reads(self) -> frozenset[str]:
        """Fields of the record that decide what is prepared."""
        return _JOINT_FIELDS.union(*(builder.reads for builder in self.builders.values()))

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> ParallelMetadata:
        """M for calls on each rank's even share of `lengths` = (query tokens, key tokens) of the whole sequence.

        Raises:
            MetadataError: the record states what the backend cannot express, or what cannot be split.
        """
        beside = record.joint_tokens
        if lengths[0] < beside[0] or lengths[1] < beside[1]:
            raise MetadataError(
                f"joint_tokens={beside} of {lengths[0]} query and {lengths[1]} key tokens: lengths count the joint "
                "streams, so they are at least as many"
            )
        shards = self.strategy.parallel.shards
        return self._build(record, shards(lengths[0] - beside[0]), shards(lengths[1] - beside[1]))

    def build_shares(self, record: AttentionMetadata, counts: Sequence[tuple[int, ...]]) -> ParallelMetadata:
        """M for calls in which every rank has so many (query tokens, key tokens), joint ones not among them.

        Raises:
            MetadataError: see build.
        """
        query, key = zip(*counts, strict=True)
        return self._build(record, Shards(query), Shards(key))

    def _build(self, record: AttentionMetadata, query: Shards, key: Shards) -> ParallelMetadata:
        lengths = (record.joint_tokens[0] + query.total, record.joint_tokens[1] + key.total)
        # The whole is checked, so that all ranks refuse alike, and none waits for others.
        read_record(record, lengths)
        record = in_key_order(record, lengths, causal=self.strategy.request.causal)
        joint = JointTokens.of(record)
        parallel = self.strategy.parallel
        rank, ranks = parallel.rank, range(parallel.config.size)
        of_rank = {number: self.strategy.views(record, query, key, joint, number) for number in ranks}
        views = of_rank[rank]
        # One product for calls that share a view.
        distinct = {id(view): view for view in views.values()}
        made = {number: self._product(view) for number, view in distinct.items()}
        self._check_others({view.on_host for view in views.values()}, of_rank)
        products = {name: made[id(view)] for name, view in views.items()}
        seen = {name: view.lengths for name, view in views.items()}
        return ParallelMetadata(query, key, joint, products, seen, (query.sizes[rank], key.sizes[rank]))

    def _check_others(
        self, known: set[tuple[object, ...]], of_rank: Mapping[int, Mapping[str, View]]
    ) -> None:
        """Refuses what a backend refuses on any rank, so that none waits for one that does not come."""
        for view in (view for views in of_rank.values() for view in views.values()):
            if view.on_host not in known:
                known.add(view.on_host)
                self._product(view)

    def _product(self, view: View) -> Any:
        product = self.builders[view.impl].build(view.record, view.lengths)
        refusal = getattr(product, "without_lse", None) if self.strategy.needs_lse else None
        if refusal is not None:
            raise MetadataError(
                f"{self.strategy.mode} merges parts by their log-sum-exp, and {refusal}; use ulysses_degree alone, or "
                "choose TORCH_SDPA for this role, or add it as fallback"
            )
        return product


class ParallelImpl:
    """Runs the local impls inside of the strategy's exchanges.

    Args:
        strategy: how the layer is split.
        impls: local ones, by name.
        lse_backward: whether gradients flow through their log-sum-exp.
    """

    def __init__(self, strategy: Strategy, impls: Mapping[str, AttentionImpl], *, lse_backward: bool) -> None:
        self.strategy, self.impls = strategy, impls
        self._loses_gradients = strategy.needs_lse and not lse_backward

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: ParallelMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of this rank's tokens to those of all ranks.

        Raises:
            MetadataError: gradients are asked of a kernel whose log-sum-exp has none, and would come out wrong.
        """
        joint, inputs = split_joint(layer_inputs)
        if self._loses_gradients and torch.is_grad_enabled():
            self._check_gradients(query, key, value, *joint.values())
        strategy = self.strategy
        tokens = strategy.pre_attention(Tokens(query, key, value, inputs, joint), metadata)
        output = strategy.attend(self.impls, tokens, metadata)
        beside = (*tokens.inputs.values(), *tokens.joint.values())
        # Ranks whose own heads or tokens made no use of some of these say so to the others in the backward pass.
        output = tied(output, tokens.query, tokens.key, tokens.value, *beside)
        return strategy.post_attention(output, metadata)

    def _check_gradients(self, *tensors: torch.Tensor) -> None:
        if any(tensor.requires_grad for tensor in tensors):
            raise MetadataError(
                f'role "{self.strategy.request.role}": {self.impls[OWN].backend} under {self.strategy.mode} has no '
                "gradients, since none flow through its log-sum-exp: run under torch.no_grad(), choose TORCH_SDPA or "
                "FLEX_ATTN, or use ulysses_degree alone"
            )
