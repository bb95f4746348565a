"""Layers of MiniMax-H3 on FASTVIDEO_VSA, and the sequence that most of their tests attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from omni_attn import Attention, AttentionMetadata, VideoLayout, use_attention_config
from omni_attn.config import load_config
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import MiniMaxH3CompetingVSAImpl, MiniMaxH3VSAImpl
from omni_attn.platforms import OmniPlatform
from tests.layer.stands import STANDS, Stand
from tests.ops.vsa_oracle import Extent

MODES: Mapping[str, type[MiniMaxH3VSAImpl]] = {
    "exempt": MiniMaxH3VSAImpl,
    "compete": MiniMaxH3CompetingVSAImpl,
}
VSA_STANDS = [stand for stand in STANDS if stand.name == "FASTVIDEO_VSA"]


@dataclass(frozen=True)
class Sequence3D:
    """Segments, and the video behind them."""

    segments: tuple[int, ...]
    grid: Extent

    @property
    def before(self) -> int:
        """Tokens before the video."""
        return sum(self.segments)

    @property
    def tokens(self) -> int:
        return self.before + prod(self.grid)

    @property
    def layout(self) -> VideoLayout:
        return VideoLayout(self.segments, (self.grid,), self.tokens)

    def record(self, gate: torch.Tensor | None = None, **fields: Any) -> AttentionMetadata:
        """What a call states, with the layer's gate beside it."""
        record = AttentionMetadata(video_layout=self.layout, **fields)
        return record if gate is None else record.with_layer_inputs(gate_compress=gate)


#: The sequence of the specification's vectors: 4 chunks and 8 tiles of 4 x 4 x 4.
PUBLISHED = Sequence3D((70, 5, 13), (5, 6, 7))
#: A small one: 3 chunks and 8 tiles of 2 x 4 x 4.
SMALL = Sequence3D((6, 0, 33), (3, 5, 6))


def h3_layer(
    platform: OmniPlatform | str = "cpu",
    *,
    impl: type[Any] | None = MiniMaxH3VSAImpl,
    variant: str | None = None,
    heads: int = 2,
    size: int = 8,
    fallback: Sequence[str] = (),
    needs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Attention:
    """A main block's layer; options are those of fastvideo_vsa. Without an impl, a plain layer of another model."""
    spec: dict[str, Any] = {"backend": "VSA", "variant": variant, "fastvideo_vsa": options}
    if fallback:
        spec["fallback"] = list(fallback)
    place: dict[str, Any] = {"device": platform} if isinstance(platform, str) else {"platform": platform}
    overrides = None if impl is None else {"FASTVIDEO_VSA": impl}
    usual = {"role": "self", "role_category": "self", "mask_usage": "never", "video_grid": True}
    with use_attention_config(load_config({"per_role": {"self": spec}}), **place):
        return Attention(heads, size, impl_overrides=overrides, **{**usual, **(needs or {})})


def stand_layer(stand: Stand, *, impl: type[Any] | None = MiniMaxH3VSAImpl, **options: Any) -> Attention:
    """The same with 4 query heads over 2 key heads of 128, on a machine that runs the stand's variant."""
    needs = {"num_kv_heads": 2, "dtype": stand.dtype}
    return h3_layer(
        stand.platform, impl=impl, variant=stand.variant, heads=4, size=128, needs=needs, **options
    )


def random_call(
    tokens: int,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    size: int = 8,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key, value and gate."""
    generator = torch.Generator().manual_seed(seed)
    counts = (heads, kv_heads or heads, kv_heads or heads, heads)
    query, key, value, gate = (
        torch.randn(batch, tokens, count, size, generator=generator).to(device, dtype) for count in counts
    )
    return query, key, value, gate
