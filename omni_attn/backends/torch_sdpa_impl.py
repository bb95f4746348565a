"""One layer on torch's scaled_dot_product_attention: TORCH_SDPA's, and the dense route of sparse backends."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from omni_attn.backends.masked import MaskedImpl
from omni_attn.ops.masks import as_additive


class TorchSDPAImpl(MaskedImpl):
    """One layer on torch's dispatcher."""

    backend: ClassVar[str] = "TORCH_SDPA"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        default_scale = self.softmax_scale == self.head_size**-0.5
        shared_heads = self.num_kv_heads != self.num_heads
        self._bare = default_scale and not shared_heads and not self._positional

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """See MaskedImpl.attend."""
        # The hot path of diffusion models: each argument left out saves host time.
        if self._bare and mask is None:
            return F.scaled_dot_product_attention(query, key, value)
        grouped = self.num_kv_heads != self.num_heads
        if mask is not None:
            if mask.dtype != torch.bool:
                mask = as_additive(mask, query.dtype)
            if grouped:  # with a mask torch has no fused kernel that shares key-value heads
                key, value = self._expand(key), self._expand(value)
                grouped = False
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.softmax_scale,
            enable_gqa=grouped,
        )

    def attend_with_lse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and its LSE from the scores in float32, one head after the other to bound memory."""
        output = self.attend(query, key, value, mask, is_causal)
        key = self._expand(key)
        if is_causal:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[
                None, None
            ]
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        for head in range(self.num_heads):
            scores = query[:, head].float() @ key[:, head].float().transpose(-1, -2) * self.softmax_scale
            if mask is not None:
                own = mask[:, head if mask.shape[1] > 1 else 0]
                scores = scores.masked_fill(~own, float("-inf")) if own.dtype == torch.bool else scores + own
            lse[:, head] = torch.logsumexp(scores, dim=-1)
        return output, lse

    def _expand(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
