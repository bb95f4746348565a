"""What impls over pages do alike before their kernel runs."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from omni_attn.backends.abstract import foreign_metadata
from omni_attn.backends.paged import PagedAttentionImpl


class PagedKernelImpl(PagedAttentionImpl):
    """An impl that reads keys and values from the cache alone, and writes its output in query's dtype."""

    #: M that its builder makes.
    metadata_cls: ClassVar[type]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See PagedAttentionImpl.forward."""
        self.refuse_output_scales(output_scale, output_block_scale)
        if metadata is None:
            return output.zero_()
        if not isinstance(metadata, self.metadata_cls):
            raise foreign_metadata(self, metadata, self.metadata_cls)
        self.attend(query, kv_cache, metadata, output)
        return output

    @abstractmethod
    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> None:
        """Attention of query [T, H, D] over the pages, written into output [T, H, Dv]."""
