"""A sparse backend of the tests' own that reads gates, so that these tests need none of the shipped ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from omni_attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.registry import register_diffusion_backend, unregister_diffusion_backend
from omni_attn.facts import BackendFacts
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.reference import reference_attention
from omni_attn.ops.video_sparse import video_sparse_attention
from omni_attn.ops.video_tiles import tile_count, video_tiles

NAME = "GATED_TILES"


@dataclass
class Seen:
    """What reached the backend, in order: its records, and the gate (or None) of each call."""

    records: list[AttentionMetadata] = field(default_factory=list)
    gates: list[Tensor | None] = field(default_factory=list)


@contextmanager
def gated_backend(
    tile: tuple[int, int, int] = (2, 2, 2), topk: int = 1, *, traceable: bool = False
) -> Iterator[Seen]:
    """GATED_TILES for the time of the block: `topk` tiles per tile; a native model runs dense where that is all.

    `traceable`: for torch.compile, without the log of gates, dense, and with one tile as the coarse branch.
    """
    seen = Seen()

    class Builder(AttentionMetadataBuilder):
        reads = frozenset({"vsa_dit_seq_shape", "preserve_vsa_all_blocks"})

        def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> Any:
            seen.records.append(record)
            grid = record.vsa_dit_seq_shape
            assert grid is not None and grid[0] * grid[1] * grid[2] == lengths[0] == lengths[1]
            kept = min(topk, tile_count(grid, tile))
            dense = kept == tile_count(grid, tile) and not record.preserve_vsa_all_blocks
            return None if dense else (video_tiles(grid, tile, torch.device("cpu")), kept)

    class Impl(AttentionImpl):
        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            metadata: Any,
            gate_compress: Tensor | None = None,
        ) -> Tensor:
            if traceable:
                assert gate_compress is not None
                heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
                dense = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
                return (dense + gate_compress * value.mean(1, keepdim=True)).contiguous()
            seen.gates.append(gate_compress)
            if metadata is None:
                return reference_attention(query, key, value)[0].to(query.dtype)
            return video_sparse_attention(
                TorchExecutor(), query, key, value, *metadata, self.softmax_scale, gate=gate_compress
            )

    class Backend(AttentionBackend):
        facts = BackendFacts(
            summary="sparse, for tests",
            dtypes=frozenset({"float32"}),
            layer_inputs=frozenset({"gate_compress"}),
            sequence_parallel=frozenset({"ulysses"}),
            compile_mode="traceable",
        )

        @staticmethod
        def get_name() -> str:
            return NAME

        @staticmethod
        def get_impl_cls() -> type[AttentionImpl]:
            return Impl

        @staticmethod
        def get_builder_cls() -> type[AttentionMetadataBuilder]:
            return Builder

    register_diffusion_backend(NAME, Backend)
    try:
        yield seen
    finally:
        unregister_diffusion_backend(NAME)
