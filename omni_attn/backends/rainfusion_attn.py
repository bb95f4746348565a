"""RAINFUSION_ATTN: training-free block sparsity for videos (RainFusion, rf_v2), with a dense route of its own.

Variants are what runs the sparse steps: our executors on every device, MindIE-SD on Huawei Ascend NPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from omni_attn.backends.abstract import AttentionBackend, foreign_metadata
from omni_attn.backends.block_sparse_builder import options_of
from omni_attn.backends.block_sparse_impl import BlockSparseImpl
from omni_attn.backends.rainfusion_builder import RainFusionMetadata, RainFusionMetadataBuilder
from omni_attn.backends.rainfusion_facts import RAINFUSION_FACTS, RAINFUSION_VARIANTS, precision_reasons
from omni_attn.backends.rainfusion_kernels import load_kernel
from omni_attn.config import AttentionSpec
from omni_attn.facts import AttentionRequest, BackendFacts, DeviceInfo, choose_variant
from omni_attn.ops.block_sparse.rainfusion import Extent, RainFusionCall, RainFusionLayout
from omni_attn.ops.block_sparse.selection import BlockSelection
from omni_attn.ops.operators import is_traced, needs_operator


class RainFusionImpl(BlockSparseImpl):
    """One layer on the kernel of a variant."""

    backend: ClassVar[str] = "RAINFUSION_ATTN"

    kernels: ClassVar[frozenset[str]] = frozenset({"kernel"})

    def load_kernels(self) -> None:
        """See BlockSparseImpl."""
        options = options_of(self.spec)
        self._sparsity = options.sparsity
        self._kind = (self.variant or "torch", options.precision)
        self.kernel, self._differentiable = load_kernel(*self._kind)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: RainFusionMetadata,
        **layer_inputs: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionImpl.forward; tokens behind those in use come out as zeros."""
        if not isinstance(metadata, RainFusionMetadata):
            raise foreign_metadata(self, metadata, RainFusionMetadata)
        if metadata.dense is not None:
            return self.dense.forward(query, key, value, metadata.dense)
        call = self._call(metadata)
        used, behind = call.layout.used_len, query.shape[1] - call.layout.used_len
        if behind:
            query, key, value = query[:, :used], key[:, :used], value[:, :used]
        output = self._attend(query, key, value, call)
        return F.pad(output, (0, 0, 0, 0, 0, behind)) if behind else output

    def select_blocks(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: RainFusionMetadata,
        **layer_inputs: torch.Tensor,
    ) -> BlockSelection | None:
        """See AttentionImpl.select_blocks; None on the route "SDPA".

        Raises:
            ConfigError: the variant selects inside of its package, which does not tell.
        """
        if not isinstance(metadata, RainFusionMetadata):
            raise foreign_metadata(self, metadata, RainFusionMetadata)
        if metadata.layout is None:
            return None
        query, key, value = (x[:, : metadata.layout.used_len] for x in (query, key, value))
        return self.kernel.select(query, key, value, self._call(metadata))

    def _call(self, metadata: RainFusionMetadata) -> RainFusionCall:
        assert metadata.layout is not None
        return RainFusionCall(metadata.layout, metadata.block_size, self._sparsity, self.softmax_scale)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: RainFusionCall
    ) -> torch.Tensor:
        if is_traced(query) or (not self._differentiable and needs_operator(query, key, value)):
            spans = [number for start, grid in call.layout.spans for number in (start, *grid)]
            return torch.ops.omni_attn.rainfusion_attention(  # type: ignore[no-any-return]
                query, key, value, spans, *call[1:], *self._kind
            )
        return self.kernel.attend(query, key, value, call)


@torch.library.custom_op("omni_attn::rainfusion_attention", mutates_args=())
def _rainfusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Sequence[int],
    block_size: int,
    sparsity: float,
    softmax_scale: float,
    variant: str,
    precision: str,
) -> torch.Tensor:
    """Spans: first token, frames, rows and columns of each video, one behind the other."""
    videos: list[tuple[int, Extent]] = [
        (spans[at], (spans[at + 1], spans[at + 2], spans[at + 3])) for at in range(0, len(spans), 4)
    ]
    layout = RainFusionLayout(query.shape[1], tuple(videos))
    call = RainFusionCall(layout, block_size, sparsity, softmax_scale)
    return load_kernel(variant, precision)[0].attend(query, key, value, call)


@_rainfusion_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])


class RainFusionBackend(AttentionBackend):
    """RainFusion over the videos of a joint sequence."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        replace(
            RAINFUSION_FACTS,
            dtypes=frozenset().union(*(variant.facts.dtypes for variant in RAINFUSION_VARIANTS)),
            value_head_size=True,
            gqa=True,
            backward=True,
        ),
        summary="RainFusion: key blocks of 128 tokens selected by their means, training-free; dense where told to be",
        variants=RAINFUSION_VARIANTS,
        option_fields=frozenset({"block_sparse"}),
        numerics="approximate",
        selects_blocks=True,
    )

    @staticmethod
    def get_name() -> str:
        """RAINFUSION_ATTN."""
        return "RAINFUSION_ATTN"

    @staticmethod
    def get_impl_cls() -> type[RainFusionImpl]:
        """RainFusionImpl."""
        return RainFusionImpl

    @staticmethod
    def get_builder_cls() -> type[RainFusionMetadataBuilder]:
        """RainFusionMetadataBuilder."""
        return RainFusionMetadataBuilder

    @classmethod
    def _choose(
        cls, request: AttentionRequest, device: DeviceInfo, spec: AttentionSpec | None
    ) -> tuple[str | None, tuple[str, ...]]:
        options = options_of(spec)
        return choose_variant(
            cls.facts,
            request,
            device,
            spec.variant if spec else None,
            by_default=spec is None,
            more_reasons=lambda variant: precision_reasons(variant.name, options),
        )
