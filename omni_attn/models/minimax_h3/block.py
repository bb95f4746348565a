"""The blocks of a MiniMax-H3 transformer. Attention is called here, in two places, each with its role.

`self`: all rows of the packed sequence among themselves, in the main blocks; `minimax_h3.token_refiner`: the rows of
the text alone, before they enter it. The latter is of another category, so that a sparse choice for `self` cannot reach
it.

Shape letters: B batch, S rows, C channels, H heads, D head size; R rows of a modulation table, one for each
(timestep, modality).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn

from omni_attn.backends.abstract import AttentionImpl
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.layer import Attention
from omni_attn.models.layers import multiply_add
from omni_attn.models.minimax_h3.config import NUM_MODALITIES, REFINER_ROLE, MiniMaxH3Config
from omni_attn.models.minimax_h3.gate import CompressionGate
from omni_attn.models.minimax_h3.rope import RopeTable, norm_and_turn
from omni_attn.ops.rowwise import rowwise_kernels

Records = Mapping[str, AttentionMetadata]


class SwiGLUFeedForward(nn.Module):
    """Linear, value * SiLU(gate), Linear, none with a bias. State-dict keys are those of diffusers."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        # Its rows are those of the values, then those of the gates.
        first = nn.ModuleDict({"proj": nn.Linear(dim, 2 * hidden_dim, bias=False)})
        self.net = nn.ModuleDict({"0": first, "2": nn.Linear(hidden_dim, dim, bias=False)})

    def forward(self, input: Tensor) -> Tensor:
        both: Tensor = self.net["0"]["proj"](input)  # type: ignore[index]
        output: Tensor = self.net["2"](swiglu(both))
        return output


def swiglu(both: Tensor) -> Tensor:
    """`value * SiLU(gate)` of rows that hold values, then gates."""
    if (kernels := rowwise_kernels(both)) is not None:
        return kernels.swiglu(both)  # type: ignore[no-any-return]
    value, gate = both.chunk(2, dim=-1)
    return value * F.silu(gate)


class MiniMaxH3Attention(nn.Module):
    """The projections and norms that attention of both kinds of blocks has in common."""

    def __init__(self, config: MiniMaxH3Config) -> None:
        super().__init__()
        self.heads = (config.num_attention_heads, config.attention_head_dim)
        self.to_q = nn.Linear(config.hidden_size, config.inner_dim, bias=False)
        self.to_k = nn.Linear(config.hidden_size, config.inner_dim, bias=False)
        self.to_v = nn.Linear(config.hidden_size, config.inner_dim, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(config.inner_dim, config.hidden_size, bias=False)])
        # Each head by itself.
        self.norm_q = nn.RMSNorm(config.attention_head_dim, eps=config.qk_norm_eps)
        self.norm_k = nn.RMSNorm(config.attention_head_dim, eps=config.qk_norm_eps)

    def project(self, input_BSC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as [B, S, H, D], before norms."""
        query, key, value = self.to_q(input_BSC), self.to_k(input_BSC), self.to_v(input_BSC)
        return query.unflatten(2, self.heads), key.unflatten(2, self.heads), value.unflatten(2, self.heads)

    def project_out(self, attended_BSHD: Tensor) -> Tensor:
        output: Tensor = self.to_out[0](attended_BSHD.flatten(2))
        return output


class PackedAttention(MiniMaxH3Attention):
    """All rows among themselves, with rotary positions; in some checkpoints with gates for the coarse output of video
    sparse attention, which are read by backends that have a coarse output.
    """

    def __init__(self, config: MiniMaxH3Config, prefix: str, vsa_impl: type[AttentionImpl]) -> None:
        super().__init__(config)
        self.to_gate_compress: nn.Module | None = (
            CompressionGate(config.hidden_size, config.inner_dim) if config.gate_compress else None
        )
        self.attention = Attention(
            *self.heads,
            role="self",
            role_category="self",
            mask_usage="never",
            video_grid=True,
            impl_overrides={"FASTVIDEO_VSA": vsa_impl},
            prefix=prefix,
        )

    def forward(self, input_BSC: Tensor, rope: RopeTable, records: Records) -> Tensor:
        query, key, value = self.project(input_BSC)
        record, gate = records["self"], self.to_gate_compress
        # What wraps a gate, as an adapter in training does, may add something to a shut one.
        is_shut = isinstance(gate, CompressionGate) and gate.adds_nothing(self.attention)
        if gate is not None and not is_shut and self.attention.reads("gate_compress"):
            # Neither norm nor positions.
            record = record.with_layer_inputs(gate_compress=gate(input_BSC).unflatten(2, self.heads))
        query, key = norm_and_turn(self.norm_q, query, rope), norm_and_turn(self.norm_k, key, rope)
        return self.project_out(self.attention(query, key, value, record))


class RefinerAttention(MiniMaxH3Attention):
    """Rows of the text among themselves, without positions."""

    def __init__(self, config: MiniMaxH3Config, prefix: str) -> None:
        super().__init__(config)
        self.attention = Attention(
            *self.heads,
            role=REFINER_ROLE,
            role_category="text",
            mask_usage="never",
            skip_sequence_parallel=True,  # the text is short, and whole on every rank
            prefix=prefix,
        )

    def forward(self, input_BSC: Tensor, record: AttentionMetadata | None) -> Tensor:
        query, key, value = self.project(input_BSC)
        return self.project_out(self.attention(self.norm_q(query), self.norm_k(key), value, record))


class RefinerBlock(nn.Module):
    """Attention and feed-forward on the text, each behind a norm; time has no say here."""

    def __init__(self, config: MiniMaxH3Config, prefix: str) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = RefinerAttention(config, f"{prefix}.attn")
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ff = SwiGLUFeedForward(config.hidden_size, config.ffn_dim)

    def forward(self, text_BSC: Tensor, record: AttentionMetadata | None) -> Tensor:
        text_BSC = text_BSC + self.attn(self.norm1(text_BSC), record)
        output: Tensor = text_BSC + self.ff(self.norm2(text_BSC))
        return output


class Modulation(nn.Module):
    """Tables of what time does to rows: `parts` vectors of C numbers for each (timestep, modality)."""

    def __init__(self, config: MiniMaxH3Config, parts: int, modalities: int) -> None:
        super().__init__()
        self.parts = (parts, config.hidden_size)
        self.linear = nn.Linear(config.adaln_dim, modalities * parts * config.hidden_size)

    def forward(self, time: Tensor) -> tuple[Tensor, ...]:
        """Time [M, adaln_dim] as tables [M * modalities, C]: row = timestep * modalities + modality."""
        rows: Tensor = self.linear(time.to(self.linear.weight.dtype)).view(-1, *self.parts)
        return rows.unbind(1)


def modulate(norm: nn.RMSNorm, input_BSC: Tensor, shift: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """`norm(x) * (1 + scale) + shift`, each row with its own row of the tables."""
    if (kernels := rowwise_kernels(input_BSC, norm.weight, shift, scale)) is not None:
        return kernels.modulated_rms_norm(input_BSC, norm.weight, norm.eps, shift, scale, rows)  # type: ignore[no-any-return]
    shift_SC, scale_SC = shift.index_select(0, rows), (1 + scale).index_select(0, rows)
    return multiply_add(shift_SC, norm(input_BSC), scale_SC, input_BSC.dtype)


def add_gated(residual_BSC: Tensor, input_BSC: Tensor, gate: Tensor, rows: Tensor) -> Tensor:
    """`residual + gate * x`, each row with its own row of the table."""
    if (kernels := rowwise_kernels(residual_BSC, input_BSC, gate)) is not None:
        return kernels.gated_sum(residual_BSC, input_BSC, gate, rows)  # type: ignore[no-any-return]
    return multiply_add(residual_BSC, input_BSC, gate.index_select(0, rows), residual_BSC.dtype)


class OutputNorm(Modulation):
    """The norm before both heads, modulated by each row's time alone."""

    def __init__(self, config: MiniMaxH3Config) -> None:
        super().__init__(config, parts=2, modalities=1)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.final_norm_eps)

    def normalise(self, hidden_states: Tensor, time: Tensor, timestep_indices: Tensor) -> Tensor:
        shift, scale = self(time)
        return modulate(self.norm, hidden_states, shift, scale, timestep_indices)


class MiniMaxH3Block(nn.Module):
    """Attention and feed-forward over the packed sequence, modulated and gated by each row's time and modality."""

    def __init__(self, config: MiniMaxH3Config, prefix: str, vsa_impl: type[AttentionImpl]) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = PackedAttention(config, f"{prefix}.attn", vsa_impl)
        self.norm2 = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ff = SwiGLUFeedForward(config.hidden_size, config.ffn_dim)
        self.adaln_proj = Modulation(config, 6, NUM_MODALITIES)

    def forward(
        self, hidden_states: Tensor, time: Tensor, rows: Tensor, rope: RopeTable, records: Records
    ) -> Tensor:
        """One step of the residual stream.

        Args:
            hidden_states: [B, S, C] in the model's dtype.
            time: embedded and activated timesteps, [M, adaln_dim].
            rows: int64 [S], `3 * index of the row's timestep + its modality`.
            rope: the table of the rows' positions.
            records: the step's record of each role.
        """
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = self.adaln_proj(time)
        attended = self.attn(modulate(self.norm1, hidden_states, shift_a, scale_a, rows), rope, records)
        hidden_states = add_gated(hidden_states, attended, gate_a, rows)
        transformed = self.ff(modulate(self.norm2, hidden_states, shift_f, scale_f, rows))
        return add_gated(hidden_states, transformed, gate_f, rows)
