"""The contract of a way to split attention over ranks: what surrounds the local impl, and what it is prepared for.

views            the step's record -> the record as the local impl sees it in each of its calls
pre_attention    a rank's own tokens -> what its impl attends with
attend           the local impl, once or several times
post_attention   its output -> the rank's own tokens again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from omni_attn.backends.abstract import AttentionImpl
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest
from omni_attn.parallel.context import Parallel
from omni_attn.parallel.joint import JointTokens, join_streams
from omni_attn.parallel.shards import Shards
from omni_attn.parallel.views import OWN, View

Inputs = Mapping[str, Tensor]


class Tokens(NamedTuple):
    """Tensors of one call.

    Attributes:
        query: [B, Sq, H, D].
        key, value: [B, Sk, G, D] and [B, Sk, G, Dv].
        inputs: the backend's layer inputs, [B, Sq, H, ...] as the query.
        joint: joint_query, joint_key, joint_value, whole on every rank; empty without joint streams.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    inputs: Inputs
    joint: Inputs


@dataclass(frozen=True, eq=False)
class ParallelMetadata:
    """M of a layer whose sequence is split.

    Attributes:
        query, key: the tokens that each rank holds, tokens of joint streams not among them.
        joint: the streams that every rank holds whole.
        products: what the local impl gets in each of its calls, by the strategy's own keys; a call that has nothing to
            compute is absent.
        lengths: (query tokens, key tokens) that each of them is prepared for, by the same keys.
        call_lengths: (query tokens, key tokens) of this rank's call, tokens of joint streams not among them.
    """

    query: Shards
    key: Shards
    joint: JointTokens
    products: Mapping[str, Any]
    lengths: Mapping[str, tuple[int, int]]
    call_lengths: tuple[int, int]

    @property
    def route(self) -> str | None:
        """A route of the backend's own that its calls take; None where it has none."""
        return self._first("route")

    @property
    def route_reason(self) -> str | None:
        """Why it takes that route."""
        return self._first("route_reason")

    @property
    def runs_kernel(self) -> bool:
        """Whether all calls run the kernel that was selected."""
        return all(getattr(product, "runs_kernel", True) for product in self.products.values())

    @property
    def unapplied(self) -> tuple[str, ...]:
        """Options that some call does not apply."""
        told = [name for product in self.products.values() for name in getattr(product, "unapplied", ())]
        return tuple(dict.fromkeys(told))

    def _first(self, name: str) -> str | None:
        told = (getattr(product, name, None) for product in self.products.values())
        return next((str(text) for text in told if text is not None), None)


def check_inputs(request: AttentionRequest, query: Tensor, inputs: Inputs) -> None:
    """Nothing if the backend's layer inputs can travel with the query: its tokens, heads, dtype and device.

    Raises:
        MetadataError: one cannot.
    """
    for name, tensor in inputs.items():
        alike = (tensor.dtype, tensor.device) == (query.dtype, query.device)
        if tensor.dim() != 4 or tensor.shape[:3] != query.shape[:3] or not alike:
            raise MetadataError(
                f'role "{request.role}": {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, and it '
                f"travels between ranks with the query, {query.dtype} {tuple(query.shape)} on {query.device}: give it "
                "for this rank's tokens and all heads, in the query's dtype and on its device"
            )


class Strategy(ABC):
    """One way to split a layer's sequence, for one layer and rank.

    Args:
        request: of the layer, all its heads.
        parallel: the ranks.

    Raises:
        ConfigError: (constructor) the layer cannot be split this way; the same on every rank, before any exchange.
    """

    #: As the request states it.
    mode: ClassVar[str]
    #: Whether it merges parts, for which it calls forward_with_lse.
    needs_lse: ClassVar[bool] = False

    def __init__(self, request: AttentionRequest, parallel: Parallel) -> None:
        self.request, self.parallel = request, parallel

    def holding(self, request: AttentionRequest) -> Self:
        """The same for this request object, equal to the one that it was made for in all that decides a split."""
        return self if request is self.request else type(self)(request, self.parallel)

    @property
    def local_heads(self) -> tuple[int, int]:
        """Query heads and key-value heads of the local impl. One of each where this rank attends with none."""
        heads, kv_heads = self.request.num_heads, self.request.num_kv_heads
        assert heads is not None and kv_heads is not None
        return heads, kv_heads

    def geometries(self) -> dict[str, dict[str, Any]]:
        """The local impls by name, each with the keywords in which it differs from one for the whole layer.

        "own" is the layer's; a causal layer may need "full" as well, in which every query sees every key.
        """
        heads, kv_heads = self.local_heads
        return {OWN: {"num_heads": heads, "num_kv_heads": kv_heads}}

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from another in a group's name: layers of equal keys share what a builder prepares."""
        return (self.mode, *self.local_heads)

    @abstractmethod
    def describe(self) -> str:
        """What the layer's ranks do, for a person: "2 ranks trade tokens for heads, 6 of 12 heads each"."""

    @abstractmethod
    def views(
        self, record: AttentionMetadata, query: Shards, key: Shards, joint: JointTokens, rank: int
    ) -> Mapping[str, View]:
        """What a rank's impl is prepared for: the record as each of its calls sees it, by this strategy's own keys.

        Args:
            rank: any: what others are prepared for tells whether it is refused there.

        Raises:
            MetadataError: the record states something that cannot be split this way.
        """

    def pre_attention(self, tokens: Tokens, metadata: ParallelMetadata) -> Tokens:
        """What the local impl attends with, from what this rank's call has."""
        return tokens

    def attend(
        self, impls: Mapping[str, AttentionImpl], tokens: Tokens, metadata: ParallelMetadata
    ) -> Tensor:
        """The local impl's output [B, Jq + Sq, H, Dv], joint queries in the order of the streams.

        Args:
            impls: those of `geometries`.
            tokens: from pre_attention.
            metadata: what was prepared.
        """
        query, key, value = join_streams(
            self.request, tokens.query, tokens.key, tokens.value, tokens.joint, metadata.joint.order
        )
        if OWN not in metadata.products or not query.shape[2]:
            return query.new_zeros((*query.shape[:3], value.shape[3]))
        seen, product = metadata.lengths[OWN][1], metadata.products[OWN]
        return impls[OWN].forward(query, key[:, :seen], value[:, :seen], product, **tokens.inputs)

    def post_attention(self, output: Tensor, metadata: ParallelMetadata) -> Tensor:
        """This rank's tokens with all heads, [B, Jq + Sq, H, Dv], from the local impl's output."""
        return output
