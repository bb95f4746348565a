"""The blocks of a Wan transformer. Attention is called here, in three places, each with its role.

`self`: the video tokens among themselves; `cross`: video to text; `cross.image`: video to image tokens, in
image-conditioned 2.1 models.

Shape letters: B batch, S or K tokens, C channels, H heads, D head size; T is 1, or S where every token has its
own timestep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.layer import Attention
from omni_attn.models.layers import FeedForward, Float32LayerNorm, modulated_layer_norm, multiply_add
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.rope import RopeTable, apply_rope

Records = Mapping[str, AttentionMetadata]


class WanAttention(nn.Module):
    """The projections and norms that self- and cross-attention have in common."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.heads = (config.num_attention_heads, config.attention_head_dim)
        self.to_q = nn.Linear(config.dim, config.dim)
        self.to_k = nn.Linear(config.dim, config.dim)
        self.to_v = nn.Linear(config.dim, config.dim)
        self.to_out = nn.ModuleList([nn.Linear(config.dim, config.dim)])
        # Over all heads together, before they are split.
        self.norm_q = nn.RMSNorm(config.dim, eps=config.eps)
        self.norm_k = nn.RMSNorm(config.dim, eps=config.eps)

    def project(self, query_BSC: Tensor, context_BSC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as [B, S, H, D], query and key normed."""
        query = self.norm_q(self.to_q(query_BSC)).unflatten(2, self.heads)
        key = self.norm_k(self.to_k(context_BSC)).unflatten(2, self.heads)
        return query, key, self.to_v(context_BSC).unflatten(2, self.heads)

    def project_out(self, attended_BSHD: Tensor) -> Tensor:
        output: Tensor = self.to_out[0](attended_BSHD.flatten(2))
        return output


class WanSelfAttention(WanAttention):
    """Video tokens among themselves, with rotary positions; in some checkpoints with gates for the coarse output of
    video sparse attention, which are read by backends that have a coarse output.
    """

    def __init__(self, config: WanConfig, prefix: str) -> None:
        super().__init__(config)
        self.to_gate_compress = nn.Linear(config.dim, config.dim) if config.gate_compress else None
        self.attention = Attention(
            *self.heads, role="self", role_category="self", mask_usage="never", video_grid=True, prefix=prefix
        )

    def forward(self, input_BSC: Tensor, rope: RopeTable, records: Records) -> Tensor:
        query, key, value = self.project(input_BSC, input_BSC)
        record = records["self"]
        if self.to_gate_compress is not None and self.attention.reads("gate_compress"):
            gate = self.to_gate_compress(input_BSC).unflatten(2, self.heads)  # neither norm nor positions
            record = record.with_layer_inputs(gate_compress=gate)
        return self.project_out(self.attention(apply_rope(query, rope), apply_rope(key, rope), value, record))


class WanCrossAttention(WanAttention):
    """Video tokens to text. Keys and values are the same on every rank, so ranks have nothing to exchange."""

    def __init__(self, config: WanConfig, prefix: str) -> None:
        super().__init__(config)
        self.attention = self._attention("cross", prefix)

    def _attention(self, role: str, prefix: str) -> Attention:
        return Attention(
            *self.heads,
            role=role,
            role_category="cross",
            mask_usage="never",
            skip_sequence_parallel=True,
            prefix=prefix,
        )

    def forward(
        self, input_BSC: Tensor, text_BSC: Tensor, image_BSC: Tensor | None, records: Records
    ) -> Tensor:
        return self.project_out(self.attention(*self.project(input_BSC, text_BSC), records["cross"]))


class WanImageCrossAttention(WanCrossAttention):
    """Video tokens to text and, with the same queries and a softmax of their own, to image tokens."""

    def __init__(self, config: WanConfig, prefix: str) -> None:
        super().__init__(config, prefix)
        self.add_k_proj = nn.Linear(config.dim, config.dim)
        self.add_v_proj = nn.Linear(config.dim, config.dim)
        self.norm_added_k = nn.RMSNorm(config.dim, eps=config.eps)
        self.image_attention = self._attention("cross.image", f"{prefix}.image")

    def forward(
        self, input_BSC: Tensor, text_BSC: Tensor, image_BSC: Tensor | None, records: Records
    ) -> Tensor:
        assert image_BSC is not None  # check_inputs refuses the call before the first block
        query, key, value = self.project(input_BSC, text_BSC)
        image_key = self.norm_added_k(self.add_k_proj(image_BSC)).unflatten(2, self.heads)
        image_value = self.add_v_proj(image_BSC).unflatten(2, self.heads)
        to_text = self.attention(query, key, value, records["cross"])
        return self.project_out(
            to_text + self.image_attention(query, image_key, image_value, records["cross.image"])
        )


class WanBlock(nn.Module):
    """Self-attention, cross-attention, feed-forward; time modulates and gates the first and the last."""

    def __init__(self, config: WanConfig, prefix: str) -> None:
        super().__init__()
        self.eps = config.eps
        self.attn1, self.attn2 = self._make_attention(config, prefix)
        # norm2 is the norm of cross-attention and the only one with weights (original Wan calls it norm3).
        self.norm2 = Float32LayerNorm(config.dim, config.eps) if config.cross_attn_norm else nn.Identity()
        self.ffn = FeedForward(config.dim, config.ffn_dim, config.dim, gelu="tanh")
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, config.dim) / config.dim**0.5)

    def _make_attention(self, config: WanConfig, prefix: str) -> tuple[WanAttention, WanAttention]:
        """Self- and cross-attention, called as those of this module are."""
        has_images = config.added_kv_proj_dim is not None
        cross = WanImageCrossAttention if has_images else WanCrossAttention
        return WanSelfAttention(config, f"{prefix}.attn1"), cross(config, f"{prefix}.attn2")

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None,
        modulation: Tensor,
        rope: RopeTable,
        records: Any,
        encoder_hidden_states_image: Tensor | None = None,
    ) -> Tensor:
        """One step of the residual stream.

        Args:
            hidden_states: [B, S, C] in the model's dtype.
            encoder_hidden_states: embedded text, [B, K, C]; None where cross-attention keeps its keys and values.
            modulation: [B, T, 6, C]; shift, scale and gate of attention, then of the feed-forward.
            rope: the grid's table.
            records: what the attention layers are told of the step: Records, or those of layers that keep a cache.
            encoder_hidden_states_image: embedded image tokens, [B, K, C], in models with an image branch.
        """
        dtype = hidden_states.dtype
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (
            self.scale_shift_table.float() + modulation
        ).unbind(2)

        attended = self.attn1(modulated_layer_norm(hidden_states, shift_a, scale_a, self.eps), rope, records)
        hidden_states = multiply_add(hidden_states, attended, gate_a, dtype)

        hidden_states = hidden_states + self.attn2(
            self.norm2(hidden_states), encoder_hidden_states, encoder_hidden_states_image, records
        )

        transformed = self.ffn(modulated_layer_norm(hidden_states, shift_f, scale_f, self.eps))
        return multiply_add(hidden_states, transformed, gate_f, dtype)
