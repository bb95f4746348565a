"""FASTVIDEO_VSA: video sparse attention (VSA, arXiv 2505.13389), a coarse stage that selects the tiles of a fine one.

Variants are executors of the fine stage, see fastvideo_vsa_facts.py; all compute the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from omni_attn.backends import sparse_executors
from omni_attn.backends.abstract import AttentionBackend, AttentionImpl, foreign_metadata
from omni_attn.backends.fastvideo_vsa_builder import FastVideoVSAMetadata, FastVideoVSAMetadataBuilder
from omni_attn.backends.fastvideo_vsa_facts import (
    VSA_FACTS,
    VSA_VARIANTS,
    fastest_first,
    options_of,
)
from omni_attn.backends.torch_sdpa_impl import TorchSDPAImpl
from omni_attn.config import AttentionSpec
from omni_attn.errors import MetadataError
from omni_attn.facts import AttentionRequest, BackendFacts, DeviceInfo, choose_variant
from omni_attn.ops.block_sparse.executor import Executor
from omni_attn.ops.block_sparse.selection import BlockSelection
from omni_attn.ops.operators import is_traced, needs_operator
from omni_attn.ops.video_sparse import select_tiles, video_sparse_attention
from omni_attn.ops.video_tiles import Extent, video_tiles


class FastVideoVSAImpl(AttentionImpl):
    """One layer on an executor, with a dense impl beside it for grids all of whose tiles are kept."""

    backend: ClassVar[str] = "FASTVIDEO_VSA"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.dense = TorchSDPAImpl(**geometry)
        self.adds_coarse = options_of(self.spec).coarse_weight == "one"
        self.executor = self._make_executor()

    def __getstate__(self) -> dict[str, Any]:
        """An executor holds kernels of this process."""
        return {name: value for name, value in self.__dict__.items() if name != "executor"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The executor is looked up again where a copy is loaded."""
        self.__dict__.update(state)
        self.executor = self._make_executor()

    def _make_executor(self) -> Executor:
        name = self.variant or VSA_VARIANTS[0].name
        return sparse_executors.make_executor(name, f"{self.backend} ({name})")

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
            _check_gate(gate_compress, query, value)
        if metadata.dense is not None:
            return self.dense.forward(query, key, value, metadata.dense)
        if metadata.used is None:
            return self._attend(query, key, value, gate_compress, metadata)
        used, behind = metadata.used, query.shape[1] - metadata.used
        gate = None if gate_compress is None else gate_compress[:, :used]
        output = self._attend(query[:, :used], key[:, :used], value[:, :used], gate, metadata)
        return F.pad(output, (0, 0, 0, 0, 0, behind))

    def select_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: FastVideoVSAMetadata,
        gate_compress: torch.Tensor | None = None,
        **layer_inputs: torch.Tensor,
    ) -> BlockSelection | None:
        """See AttentionImpl.select_blocks; None on the route "SDPA"."""
        if metadata.dense is not None:
            return None
        query, key, value = (x[:, : metadata.used] for x in (query, key, value))
        gate = None if gate_compress is None else gate_compress[:, : metadata.used]
        tiles = video_tiles(metadata.grid, metadata.tile_size, query.device)
        means = self.executor.pack(query, key, value, tiles, tiles).means
        selected, term = select_tiles(
            means, metadata.topk, self.softmax_scale, query.dtype, gate=gate, coarse=self.adds_coarse
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
        numbers = (metadata.grid, metadata.tile_size, metadata.topk, self.softmax_scale, self.adds_coarse)
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


def attend_tiles(
    executor: Executor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    grid: Extent,
    tile_size: Extent,
    topk: int,
    softmax_scale: float,
    adds_coarse: bool,
) -> torch.Tensor:
    """Video sparse attention of query [B, S, H, D] over key [B, S, G, D], value [B, S, G, Dv]: [B, S, H, Dv]."""
    tiles = video_tiles(grid, tile_size, query.device)
    return video_sparse_attention(
        executor, query, key, value, tiles, topk, softmax_scale, gate=gate, coarse=adds_coarse
    )


@torch.library.custom_op("omni_attn::video_sparse_attention", mutates_args=())
def _video_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    grid: Sequence[int],
    tile_size: Sequence[int],
    topk: int,
    softmax_scale: float,
    adds_coarse: bool,
    executor: str,
) -> torch.Tensor:
    frames, rows, columns = grid
    depth, height, width = tile_size
    extents = ((frames, rows, columns), (depth, height, width))
    made = sparse_executors.make_executor(executor, f"FASTVIDEO_VSA ({executor})")
    return attend_tiles(made, query, key, value, gate, *extents, topk, softmax_scale, adds_coarse)


@_video_sparse_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


def _check_gate(gate: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> None:
    wanted = (*query.shape[:3], value.shape[-1])
    if gate.shape != wanted or gate.dtype != query.dtype or gate.device != query.device:
        raise MetadataError(
            f"FASTVIDEO_VSA needs gate_compress {wanted} {query.dtype} on {query.device}, one gate for each number of "
            f"the output; found {tuple(gate.shape)} {gate.dtype} on {gate.device}"
        )


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
