"""FASTVIDEO_VSA: video sparse attention (VSA, arXiv 2505.13389), a coarse stage that selects the tiles of a fine one.

Variants are executors of the fine stage, see fastvideo_vsa_facts.py; all compute the same.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from omni_attn.backends import sparse_executors
from omni_attn.backends.abstract import AttentionBackend, foreign_metadata
from omni_attn.backends.block_sparse_impl import BlockSparseImpl
from omni_attn.backends.fastvideo_vsa_builder import FastVideoVSAMetadata, FastVideoVSAMetadataBuilder
from omni_attn.backends.fastvideo_vsa_facts import (
    VSA_FACTS,
    VSA_VARIANTS,
    fastest_first,
    options_of,
)
from omni_attn.backends.fastvideo_vsa_ops import attend_tiles
from omni_attn.config import AttentionSpec
from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest, BackendFacts, DeviceInfo, choose_variant
from omni_attn.ops.block_sparse.selection import BlockSelection
from omni_attn.ops.operators import is_traced, needs_operator
from omni_attn.ops.video_sparse import select_tiles
from omni_attn.ops.video_tiles import chunk_sizes, video_tiles


class FastVideoVSAImpl(BlockSparseImpl):
    """One layer on an executor; grids all of whose tiles are kept may stay dense."""

    backend: ClassVar[str] = "FASTVIDEO_VSA"
    kernels: ClassVar[frozenset[str]] = frozenset({"executor"})

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.adds_coarse = options_of(self.spec).coarse_weight == "one"

    def load_kernels(self) -> None:
        """See BlockSparseImpl."""
        name = self.variant or VSA_VARIANTS[0].name
        self.executor = sparse_executors.make_executor(name, f"{self.backend} ({name})")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: FastVideoVSAMetadata,
        gate_compress: torch.Tensor | None = None,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward.

        Args:
            gate_compress: [B, S, H, Dv] in query's dtype, multiplied element by element with the coarse output; None =
                sparse attention alone, unless the options give the coarse output weight one. Not read on the route
                "SDPA".

        Raises:
            MetadataError: the gate has another shape, dtype or device than the output.
        """
        if not isinstance(metadata, FastVideoVSAMetadata):
            raise foreign_metadata(self, metadata, FastVideoVSAMetadata)
        if gate_compress is not None:
            gate_compress = self.check_gate(gate_compress, query, value)
        if metadata.dense is not None:
            return self.attend_densely(query, key, value, gate_compress, metadata)
        if metadata.used is None:
            return self._attend(query, key, value, gate_compress, metadata)
        used, behind = metadata.used, query.shape[1] - metadata.used
        gate = None if gate_compress is None else gate_compress[:, :used]
        output = self._attend(query[:, :used], key[:, :used], value[:, :used], gate, metadata)
        return F.pad(output, (0, 0, 0, 0, 0, behind))

    def check_gate(self, gate: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The gate of these query tokens.

        Raises:
            MetadataError: it has another shape, dtype or device than the output.
        """
        wanted = (*query.shape[:3], value.shape[-1])
        if gate.shape != wanted or gate.dtype != query.dtype or gate.device != query.device:
            raise MetadataError(
                f"FASTVIDEO_VSA needs gate_compress {wanted} {query.dtype} on {query.device}, one gate for each number "
                f"of the output; found {tuple(gate.shape)} {gate.dtype} on {gate.device}"
            )
        return gate

    def attend_densely(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor | None,
        metadata: FastVideoVSAMetadata,
    ) -> torch.Tensor:
        """The output of a product with `dense`, [B, S, H, Dv]; here without the coarse term."""
        assert metadata.dense is not None
        return self.dense.forward(query, key, value, metadata.dense)

    def select_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: FastVideoVSAMetadata,
        gate_compress: torch.Tensor | None = None,
        **layer_inputs: torch.Tensor,
    ) -> BlockSelection | None:
        """See AttentionImpl.select_blocks; None on dense routes."""
        if not isinstance(metadata, FastVideoVSAMetadata):
            raise foreign_metadata(self, metadata, FastVideoVSAMetadata)
        if metadata.dense is not None:
            return None
        gate = gate_compress
        if gate is not None:
            gate = self.check_gate(gate, query, value)[:, : metadata.used]
        query, key, value = (x[:, : metadata.used] for x in (query, key, value))
        tiles = video_tiles(metadata.grid, metadata.tile_size, query.device, metadata.segments)
        means = self.executor.pack(query, key, value, tiles, tiles).means
        selected, term = select_tiles(
            means,
            metadata.topk,
            self.softmax_scale,
            query.dtype,
            gate=gate,
            coarse=self.adds_coarse,
            prefix_blocks=len(chunk_sizes(metadata.segments, metadata.tile_size)),
            compete=metadata.compete,
        )
        return BlockSelection(selected, tiles, tiles, term)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        gate: torch.Tensor | None,
        metadata: FastVideoVSAMetadata,
    ) -> torch.Tensor:
        numbers = (
            metadata.grid,
            metadata.tile_size,
            metadata.topk,
            self.softmax_scale,
            self.adds_coarse,
            metadata.segments,
            metadata.compete,
        )
        if is_traced(query) or self._loses_gradients(query, key, value, gate):
            return torch.ops.omni_attn.video_sparse_attention(  # type: ignore[no-any-return]
                query, key, value, gate, *numbers, self.executor.name
            )
        return attend_tiles(self.executor, query, key, value, gate, *numbers)

    def _loses_gradients(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gate: torch.Tensor | None
    ) -> bool:
        """Whether somebody may ask for gradients that the executor does not give; the operator refuses a backward."""
        if self.executor.differentiable:
            return False
        gated = gate is not None and gate.requires_grad and torch.is_grad_enabled()
        return gated or needs_operator(query, key, value)


class FastVideoVSABackend(AttentionBackend):
    """Video sparse attention of the self-attention of a video model."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        replace(
            VSA_FACTS,
            dtypes=VSA_VARIANTS[-1].facts.dtypes,
            value_head_size=True,
            backward=True,
        ),
        summary="video sparse attention: tiles selected by their means, on ours or others' block-sparse kernels",
        variants=VSA_VARIANTS,
        option_fields=frozenset({"fastvideo_vsa", "fastvideo_vsa_topk"}),
        layer_inputs=frozenset({"gate_compress"}),
        numerics="approximate",
        selects_blocks=True,
    )

    @staticmethod
    def get_name() -> str:
        """FASTVIDEO_VSA."""
        return "FASTVIDEO_VSA"

    @staticmethod
    def get_impl_cls() -> type[FastVideoVSAImpl]:
        """FastVideoVSAImpl."""
        return FastVideoVSAImpl

    @staticmethod
    def get_builder_cls() -> type[FastVideoVSAMetadataBuilder]:
        """FastVideoVSAMetadataBuilder."""
        return FastVideoVSAMetadataBuilder

    @classmethod
    def _choose(
        cls, request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None
    ) -> tuple[str | None, tuple[str, ...]]:
        facts, pinned = cls.facts, spec.variant if spec else None
        if pinned is None:
            volume = math.prod(options_of(spec).tile_size)
            facts = replace(facts, variants=fastest_first(facts.variants, device.capability, volume))
        return choose_variant(facts, request, device, pinned, by_default=spec is None)
