"""TORCH_SDPA over a paged cache of latents: in torch, in float32 and wider. The reference."""

from __future__ import annotations

from typing import ClassVar

import torch

from omni_attn.backends.abstract import foreign_metadata
from omni_attn.backends.mla import MLAImpl, MLAMetadata
from omni_attn.ops.mla.bounds import RaggedBounds
from omni_attn.ops.mla.reference import attend_latents, attend_ragged


class TorchMLAImpl(MLAImpl):
    """One layer on torch's operators."""

    backend: ClassVar[str] = "TORCH_SDPA"

    def forward_mqa(
        self, query: tuple[torch.Tensor, torch.Tensor], kv_cache: torch.Tensor, metadata: MLAMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See MLAImpl.forward_mqa."""
        rows = metadata.decode
        if rows is None:
            raise foreign_metadata(self, metadata, MLAMetadata)
        return attend_latents(
            *query,
            kv_cache,
            row_requests=rows.row_requests,
            row_lens=rows.row_lens,
            block_table=rows.block_table,
            max_seq_len=rows.max_seq_len,
            softmax_scale=self.softmax_scale,
            latent_scale=self.latent_scale,
        )

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
        """See MLAImpl.attend_ragged."""
        return attend_ragged(
            query,
            key,
            rope_key,
            value,
            bounds,
            causal=causal,
            softmax_scale=self.softmax_scale,
            output=output,
        )
