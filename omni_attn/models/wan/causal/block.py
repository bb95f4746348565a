"""Blocks of a causal Wan transformer: the weights of WanBlock, and attention over pages.

`self`: a chunk's tokens to themselves and to the pages of the frames before them; `cross`: to the text, whose keys and
values are in pages too, and were written once.

Shape letters: B streams, S tokens of a chunk, C channels, H heads, D head size; T = B * S.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from omni_attn.kv_cache.step import PagedCall
from omni_attn.models.wan.block import WanAttention, WanBlock
from omni_attn.models.wan.causal.plan import CachePlan
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.rope import RopeTable, apply_rope
from omni_attn.paged_layer import PagedAttention


class BlockCalls(NamedTuple):
    """What the attention layers of one block get in a step."""

    frames: PagedCall
    text: PagedCall


class CausalSelfAttention(WanAttention):
    """A chunk to itself and to what came before. Not causal: what a chunk may see is what its pages hold."""

    def __init__(self, config: WanConfig, prefix: str, plan: CachePlan) -> None:
        super().__init__(config)
        self.to_gate_compress = nn.Linear(config.dim, config.dim) if config.gate_compress else None
        self.attention = PagedAttention(
            *self.heads,
            role="self",
            role_category="self",
            kv_cache=plan.self_spec(config),
            dtype=plan.dtype,
            prefix=prefix,
        )

    def forward(self, input_BSC: Tensor, rope: RopeTable, calls: BlockCalls) -> Tensor:
        query, key, value = self.project(input_BSC, input_BSC)
        rows = (apply_rope(query, rope), apply_rope(key, rope), value)
        attended = self.attention(*(x.flatten(0, 1) for x in rows), calls.frames)
        return self.project_out(attended.view_as(query))


class CausalCrossAttention(WanAttention):
    """A chunk to the text."""

    def __init__(self, config: WanConfig, prefix: str, plan: CachePlan) -> None:
        super().__init__(config)
        self.attention = PagedAttention(
            *self.heads,
            role="cross",
            role_category="cross",
            kv_cache=plan.text_spec(config),
            dtype=plan.dtype,
            prefix=prefix,
        )

    def write(self, text_BSC: Tensor, call: PagedCall) -> None:
        """Puts keys and values of embedded text into their pages."""
        key = self.norm_k(self.to_k(text_BSC)).unflatten(2, self.heads)
        value = self.to_v(text_BSC).unflatten(2, self.heads)
        self.attention.write(key.flatten(0, 1), value.flatten(0, 1), call)

    def forward(self, input_BSC: Tensor, _text: None, _image: None, calls: BlockCalls) -> Tensor:
        query = self.norm_q(self.to_q(input_BSC)).unflatten(2, self.heads)
        attended = self.attention(query.flatten(0, 1), None, None, calls.text)
        return self.project_out(attended.view_as(query))


class CausalWanBlock(WanBlock):
    """WanBlock whose attention layers keep pages; it takes BlockCalls as `records`."""

    def __init__(self, config: WanConfig, prefix: str, *, plan: CachePlan) -> None:
        self.plan = plan  # first: the attention layers are made from it
        super().__init__(config, prefix)

    def _make_attention(self, config: WanConfig, prefix: str) -> tuple[WanAttention, WanAttention]:
        return (
            CausalSelfAttention(config, f"{prefix}.attn1", self.plan),
            CausalCrossAttention(config, f"{prefix}.attn2", self.plan),
        )
