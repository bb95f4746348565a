"""A video sparse backend in plain torch that runs anywhere, and can be told to be dense at some steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from omni_attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.facts import BackendFacts
from omni_attn.ops.block_sparse.selection import BlockSelection
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.reference import reference_attention
from omni_attn.ops.video_sparse import select_tiles, video_sparse_attention
from omni_attn.ops.video_tiles import video_tiles
from tests.selection.stubs import FLOATS

EXECUTOR = TorchExecutor()


class TiledOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    topk: int = 2
    tile: tuple[int, int, int] = (2, 2, 2)
    coarse: bool = False
    dense_from: int = 10**9
    refused_from: int = 10**9


@dataclass(frozen=True, eq=False)
class TiledMetadata:
    grid: tuple[int, int, int]
    is_dense: bool
    route: str


class TiledBuilder(AttentionMetadataBuilder):
    reads = frozenset({"vsa_dit_seq_shape", "step"})

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> TiledMetadata:
        options = options_of(self.spec)
        step = record.step or 0
        if step >= options.refused_from:
            raise MetadataError(f"TILED_TEST: no step from {options.refused_from} on, found {step}")
        assert record.vsa_dit_seq_shape is not None
        is_dense = step >= options.dense_from
        return TiledMetadata(record.vsa_dit_seq_shape, is_dense, "DENSE" if is_dense else "SPARSE")


class TiledImpl(AttentionImpl):
    backend: ClassVar[str] = "TILED_TEST"

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any, **_: torch.Tensor
    ) -> torch.Tensor:
        if metadata.is_dense:
            return reference_attention(query, key, value)[0].to(query.dtype)
        options = options_of(self.spec)
        tiles = video_tiles(metadata.grid, options.tile, query.device)
        topk = min(options.topk, tiles.num_blocks)
        return video_sparse_attention(
            EXECUTOR, query, key, value, tiles, topk, self.softmax_scale, coarse=options.coarse
        )

    def select_blocks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any, **_: torch.Tensor
    ) -> BlockSelection | None:
        if metadata.is_dense:
            return None
        options = options_of(self.spec)
        tiles = video_tiles(metadata.grid, options.tile, query.device)
        means = EXECUTOR.pack(query, key, value, tiles, tiles).means
        topk = min(options.topk, tiles.num_blocks)
        selected, term = select_tiles(means, topk, self.softmax_scale, query.dtype, coarse=options.coarse)
        return BlockSelection(selected, tiles, tiles, term)


class TiledBackend(AttentionBackend):
    facts = BackendFacts(
        dtypes=FLOATS,
        needs_video_grid=True,
        value_head_size=True,
        gqa=True,
        unequal_lengths=False,
        numerics="approximate",
        selects_blocks=True,
    )
    options_model = TiledOptions

    @staticmethod
    def get_name() -> str:
        return "TILED_TEST"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return TiledImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return TiledBuilder


def options_of(spec: Any) -> TiledOptions:
    return TiledOptions.model_validate(dict(spec.options or {}))


TILED = ("TILED_TEST", TiledBackend)
