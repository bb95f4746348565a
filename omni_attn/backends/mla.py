"""The contract of multi-head latent attention over a paged cache: a second pair of classes beside those of paged.py.

MLAMetadata           what a builder (mla_builder.py) makes of a step: decodes and prefills apart
MLAImpl               one per layer: writes latents, attends from absorbed queries (MQA) and in the open form (MHA)

Decodes have few new tokens: their queries are brought into the latent space and attend to the cache itself. Prefills
have many: keys and values of every head are made of the latents, which costs less per pair of tokens. Legend: see
omni_attn.ops.mla.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from omni_attn.backends.abstract import LayerGeometry, foreign_metadata
from omni_attn.backends.cache_scales import CacheScales
from omni_attn.backends.mla_context import ContextChunk
from omni_attn.backends.paged_split import Split
from omni_attn.facts.kv_cache import AttentionCGSupport, KVCacheSpec
from omni_attn.ops.merge_state import merge_attn_states
from omni_attn.ops.mla.bounds import RaggedBounds
from omni_attn.ops.mla.write import read_latents, write_latents
from omni_attn.ops.operators import is_traced

UpProjection = Callable[[torch.Tensor], torch.Tensor]
"""Latents [S, C] -> [S, H * (K + V)], a key's part without positions before the value, head by head."""


class MLASizes(NamedTuple):
    """Channels: of the latent, and of one head's key without positions, key with positions, and value."""

    latent: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeRows:
    """The part of a step that attends from absorbed queries: one row per token.

    Attributes:
        block_table: int32 [requests, W].
        row_requests, row_lens: int32 [rows], whose token it is, and how many of the request's keys it sees; a token of
            no request sees none.
        max_seq_len: most keys of any of them, or more.
        plan: what the kernel's builder makes of the sizes.
    """

    block_table: torch.Tensor
    row_requests: torch.Tensor
    row_lens: torch.Tensor
    max_seq_len: int
    plan: Any = None


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefillRows:
    """The part of a step that attends in the open form: to its own tokens, causally, and to chunks of earlier ones."""

    own: RaggedBounds
    chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class MLAMetadata:
    """M of latent attention.

    Attributes:
        split: requests and tokens of each side, with padding.
        num_tokens: tokens of both sides, without padding behind the last prefill.
        slot_mapping: see CommonAttentionMetadata.
        decode, prefill: None = the step has none.
    """

    split: Split
    num_tokens: int
    slot_mapping: torch.Tensor | None
    decode: DecodeRows | None
    prefill: PrefillRows | None


class MLAImpl(CacheScales, LayerGeometry, ABC):
    """One layer's kernels over a paged cache of latents. Imports its optional package in the constructor.

    Args:
        kv_cache_spec: of the layer, with the page size that the kernel gets.
        sizes: channels; of the geometry, head_size counts latent and rope channels, value_head_size the latent ones.

    Raises:
        BackendImportError: (constructor) the package is missing, broken, or lacks a needed symbol.
    """

    backend: ClassVar[str] = ""
    #: See PagedAttentionImpl.cudagraph_support.
    cudagraph_support: ClassVar[AttentionCGSupport | None] = None
    #: What is stored is the latent / latent_scale, for caches of fewer bits; a loader sets another one.
    latent_scale: float = 1.0
    scale_names: ClassVar[tuple[str, ...]] = ("latent_scale",)

    def __init__(self, *, kv_cache_spec: KVCacheSpec, sizes: MLASizes, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.kv_cache_spec, self.sizes = kv_cache_spec, sizes

    def update_kv_cache(
        self,
        latent: torch.Tensor,
        rope_key: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes latents [T, C] and rope keys [T, E] into their slots; one for all kernels, see write_latents."""
        tensors = (latent, rope_key, kv_cache, slot_mapping)
        write_latents(*tensors, scale=self.latent_scale, host_scales=self.host_scales)

    @abstractmethod
    def forward_mqa(
        self, query: tuple[torch.Tensor, torch.Tensor], kv_cache: torch.Tensor, metadata: MLAMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Absorbed queries of the decodes over the latents of their pages.

        Args:
            query: [rows, H, C] and [rows, H, E], any strides.
            metadata: with decodes.

        Returns:
            Latents [rows, H, C], which the layer brings into each head's values; and the log-sum-exp [H, rows] in
            float32, None = the kernel gives none.
        """

    @abstractmethod
    def attend_ragged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        rope_key: torch.Tensor,
        value: torch.Tensor,
        bounds: RaggedBounds,
        *,
        causal: bool,
        output: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, K + E] over keys [S, H, K] with [S, E] behind each, and values [S, H, V].

        Args:
            causal: bottom-right aligned in each request.
            output: [T, H, V] that is written; None = a new tensor.

        Returns:
            [T, H, V], zeros for queries without a key; and the log-sum-exp [H, T] in float32, -inf for those.
        """

    def forward_mha(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        rope_key: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: MLAMetadata,
        up_projection: UpProjection,
        output: torch.Tensor,
    ) -> None:
        """The prefills in the open form: their own tokens, then each chunk of earlier ones, merged in float32.

        Args:
            query: [tokens, H, K + E]; latent: [tokens, C] and rope_key: [tokens, E] of the prefills' own tokens.
            metadata: with prefills.
            output: [tokens, H, V] that is written.
        """
        prefill = metadata.prefill
        if prefill is None:
            raise foreign_metadata(self, metadata, MLAMetadata)
        key, value = self._open(latent, up_projection)
        _, lse = self.attend_ragged(query, key, rope_key, value, prefill.own, causal=True, output=output)
        scale: float | torch.Tensor = self.latent_scale
        if self.host_scales is not None and is_traced(query):
            scale = self.host_scales[0]
        for chunk in prefill.chunks:
            rows = read_latents(kv_cache, chunk.pages, chunk.places, query.dtype, scale)
            key, value = self._open(rows[:, : self.sizes.latent], up_projection)
            rope_key = rows[:, self.sizes.latent :]
            tokens = slice(*chunk.tokens)
            part, part_lse = self.attend_ragged(
                query[tokens], key, rope_key, value, chunk.bounds, causal=False
            )
            _, lse[:, tokens] = merge_attn_states(
                output[tokens], lse[:, tokens], part, part_lse, output[tokens]
            )

    def _open(self, latent: torch.Tensor, up_projection: UpProjection) -> tuple[torch.Tensor, torch.Tensor]:
        """Key without positions [S, H, K] and value [S, H, V] of each head, views of one tensor."""
        opened = up_projection(latent).view(latent.shape[0], self.num_heads, -1)
        return opened[..., : self.sizes.nope], opened[..., self.sizes.nope :]
