"""One call of one layer, alone and split over ranks, held against attention in float64.

The reference joins streams and writes the causal triangle into a mask by itself: joint keys are seen by every query,
and the triangle lies over the tokens of the sequence alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.ops.reference import reference_attention
from omni_attn.parallel import Parallel
from omni_attn.testing import fake_ranks

SIZE = 8
CONFIGS: dict[str, dict[str, Any]] = {
    "ulysses 2": {"ulysses_degree": 2},
    "ulysses 3": {"ulysses_degree": 3},
    "ring 2": {"ring_degree": 2},
    "ring 3": {"ring_degree": 3},
    "ulysses 2 ring 2": {"ulysses_degree": 2, "ring_degree": 2},
    "allgather 2": {"allgather_degree": 2},
    "allgather 3": {"allgather_degree": 3},
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
every_mode = pytest.mark.parametrize(
    "config", [CONFIGS[n] for n in ("ulysses 2", "ring 2", "ulysses 2 ring 2", "allgather 2")], ids=str
)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Call:
    """Tensors of the whole sequence, joint streams beside them, and what layer and record say."""

    length: int = 7
    key_length: int | None = None
    batch: int = 2
    heads: int = 4
    kv_heads: int | None = None
    value_size: int = SIZE
    joint: tuple[int, int] = (0, 0)
    order: Literal["front", "rear"] = "front"
    needs: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "TORCH_SDPA"

    def __post_init__(self) -> None:
        groups = self.kv_heads or self.heads
        keys = self.length if self.key_length is None else self.key_length
        sizes = ((self.heads, SIZE), (groups, SIZE), (groups, self.value_size))
        lengths, counts = (self.length, keys, keys), (self.joint[0], self.joint[1], self.joint[1])
        self.own = [randn(self.batch, n, *sizes[i], seed=i) for i, n in enumerate(lengths)]
        streams = [randn(self.batch, n, *sizes[i], seed=9 + i) for i, n in enumerate(counts)]
        named = zip(("joint_query", "joint_key", "joint_value"), streams, strict=True)
        self.streams = {name: stream for name, stream in named if stream.shape[1]}

    @property
    def whole_lengths(self) -> tuple[int, int]:
        return self.joint[0] + self.own[0].shape[1], self.joint[1] + self.own[1].shape[1]

    def joined(self, own: Tensor, name: str) -> Tensor:
        parts = [self.streams[name], own] if name in self.streams else [own]
        return torch.cat(parts if self.order == "front" else parts[::-1], dim=1)

    def expected(self, mask: Tensor | None = None) -> Tensor:
        """Attention in float64 of everything; `mask` in place of the record's."""
        names = ("joint_query", "joint_key", "joint_value")
        query, key, value = (self.joined(own, name) for own, name in zip(self.own, names, strict=True))
        mask = self.fields.get("attn_mask") if mask is None else mask
        if self.needs.get("causal"):
            queries, keys = self.own[0].shape[1], self.own[1].shape[1]
            triangle = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            seen = torch.ones(queries, self.joint[1], dtype=torch.bool)
            keep = torch.cat((seen, triangle) if self.order == "front" else (triangle, seen), dim=1)
            mask = keep[None, None] if mask is None else _both(mask, keep)
        scale = self.needs.get("softmax_scale")
        return reference_attention(query, key, value, attn_mask=mask, softmax_scale=scale)[0]

    def layer(self) -> Attention:
        value = {"value_head_size": self.value_size} if self.value_size != SIZE else {}
        with use_attention_config(self.backend, device="cpu"):
            return Attention(
                self.heads, SIZE, role="self", num_kv_heads=self.kv_heads, **{**value, **self.needs}
            )

    def record(self) -> AttentionMetadata:
        return AttentionMetadata(joint_tokens=self.joint, joint_order=self.order, **self.fields)

    def alone(self) -> Tensor:
        """What one process gives."""
        record = self.record()
        layer = self.layer()
        prepare_attention(layer, {"self": record}, {"self": self.whole_lengths})
        return layer(*self.own, record.with_layer_inputs(**self.streams))

    def on_ranks(self, config: dict[str, Any], *, prepared: bool = True) -> Tensor:
        """What ranks give, put together; a joint query's output has to be the same on all."""

        def work(parallel: Parallel) -> Tensor:
            layer, record = self.layer(), self.record()
            if prepared:
                prepare_attention(layer, {"self": record}, {"self": self.whole_lengths})
            own = [parallel.split(tensor) for tensor in self.own]
            output = layer(*own, record.with_layer_inputs(**self.streams))
            assert output.is_contiguous()
            return output

        return self.together(fake_ranks(config, work))

    def together(self, outputs: list[Tensor]) -> Tensor:
        count = self.joint[0]
        if self.order == "front":
            streams, own = zip(*(out.tensor_split([count], dim=1) for out in outputs), strict=True)
        else:
            own, streams = zip(
                *(out.tensor_split([out.shape[1] - count], dim=1) for out in outputs), strict=True
            )
        for stream in streams[1:]:
            torch.testing.assert_close(stream, streams[0], atol=1e-5, rtol=0)
        parts = [streams[0], *own] if self.order == "front" else [*own, streams[0]]
        return torch.cat(parts, dim=1)

    def check(self, config: dict[str, Any], mask: Tensor | None = None, *, prepared: bool = True) -> None:
        """Alone and on ranks, it is the reference."""
        expected = self.expected(mask).float()
        torch.testing.assert_close(self.alone(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(self.on_ranks(config, prepared=prepared), expected, atol=1e-5, rtol=0)


def _both(mask: Tensor, keep: Tensor) -> Tensor:
    mask = mask[:, None, None] if mask.dim() == 2 else mask
    return mask & keep if mask.dtype == torch.bool else mask.masked_fill(~keep, float("-inf"))
