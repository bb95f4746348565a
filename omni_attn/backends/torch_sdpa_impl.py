"""One layer on torch's scaled_dot_product_attention: TORCH_SDPA's, and the dense route of sparse backends."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from omni_attn.backends.masked import MaskedImpl
from omni_attn.ops.masks import as_additive

#: Scores that are held at a time for a log-sum-exp, which torch's call does not give: 256 MB in float32.
MAX_SCORES = 2**26


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
        """The output, and its LSE from the scores in float32, some rows of one head at a time to bound memory."""
        output = self.attend(query, key, value, mask, is_causal)
        key = self._expand(key)
        if is_causal:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[
                None, None
            ]
        lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        count = max(1, MAX_SCORES // max(1, key.shape[0] * key.shape[2]))
        log_sum_exp = _recomputed if torch.is_grad_enabled() else _log_sum_exp
        for head in range(self.num_heads):
            own = None if mask is None else mask[:, head if mask.shape[1] > 1 else 0]
            for first in range(0, query.shape[2], count):
                rows = slice(first, first + count)
                seen = own if own is None or own.shape[1] == 1 else own[:, rows]
                lse[:, head, rows] = log_sum_exp(query[:, head, rows], key[:, head], seen, self.softmax_scale)
        return output, lse

    def _expand(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)


def _log_sum_exp(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, softmax_scale: float
) -> torch.Tensor:
    """[B, Sq] in float32 of query [B, Sq, D] and key [B, Sk, D], with a mask [B|1, Sq|1, Sk]."""
    scores = query.float() @ (key.float() * softmax_scale).transpose(-1, -2)
    return torch.logsumexp(scores if mask is None else _masked(scores, mask), dim=-1)


def _recomputed(*arguments: Any) -> torch.Tensor:
    """The same, whose scores are made again in the backward pass: kept, those of all heads would fill the memory."""
    made: torch.Tensor = checkpoint(_log_sum_exp, *arguments, use_reentrant=False, preserve_rng_state=False)
    return made


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scores with a mask, bool or added. Hidden ones are filled in: a row of them would have NaN as gradient."""
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, float("-inf"))
    hidden = mask == float("-inf")
    return (scores + mask.masked_fill(hidden, 0.0)).masked_fill(hidden, float("-inf"))
