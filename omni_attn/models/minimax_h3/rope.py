"""Rotary position embedding at real-valued (t, h, w) coordinates, on the first channels of a head.

Shape letters: B batch, S rows, H heads, D head size; P = 3 * rope_freq_dim channel pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from omni_attn.models.layers import multiply_add
from omni_attn.ops.rowwise import rowwise_kernels


class RopeTable(NamedTuple):
    """What the first and the second half of the turning channels contribute to both halves.

    `first` holds (cos, sin) and `second` (-sin, cos), each [S, 1, 2, P] in the dtype of the residual stream.
    """

    first: Tensor
    second: Tensor


def build_rope_table(position_ids: Tensor, rope_freq_dim: int, theta: float, dtype: torch.dtype) -> RopeTable:
    """The table of rows at these coordinates.

    The axes share their frequencies `theta ** (-i / rope_freq_dim)`; a row's angles are those of t, of h, then of w.
    Computed in float32, as the model was trained, and stored in the dtype it multiplies in.

    Args:
        position_ids: [S, 3], any dtype.
    """
    # As one over a power: exact to the last bit with how checkpoints' own frequencies were made.
    exponent = torch.arange(rope_freq_dim, dtype=torch.float32, device=position_ids.device) * 2
    frequency = 1.0 / theta ** (exponent / (2 * rope_freq_dim))
    angle = (position_ids.float().unsqueeze(2) * frequency).flatten(1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return RopeTable(
        torch.stack([cos, sin], dim=1).unsqueeze(1), torch.stack([-sin, cos], dim=1).unsqueeze(1)
    )


def norm_and_turn(norm: nn.RMSNorm, input_BSHD: Tensor, table: RopeTable) -> Tensor:
    """Each head normed, then turned."""
    if (kernels := rowwise_kernels(input_BSHD, norm.weight)) is not None:
        cos, sin = table.first[:, 0].unbind(1)
        return kernels.rotated_rms_norm(input_BSHD, norm.weight, norm.eps, cos, sin)  # type: ignore[no-any-return]
    return apply_rope(norm(input_BSHD), table)


def apply_rope(input_BSHD: Tensor, table: RopeTable) -> Tensor:
    """Channels c and c + P turned together for c < P: (x0 cos - x1 sin, x1 cos + x0 sin); the rest as they are."""
    pairs = table.first.shape[-1]
    halves = _halves(input_BSHD, pairs)
    first, second, rest = halves[..., :1, :], halves[..., 1:, :], input_BSHD[..., 2 * pairs :]
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        turned = multiply_add(first * table.first, second, table.second, input_BSHD.dtype).flatten(-2)
        return torch.cat([turned, rest], dim=-1)
    # In eager inference straight to their places, without what a concatenation would move once more.
    output_BSHD = torch.empty_like(input_BSHD)
    torch.addcmul(first * table.first, second, table.second, out=_halves(output_BSHD, pairs))
    output_BSHD[..., 2 * pairs :] = rest
    return output_BSHD


def _halves(input_BSHD: Tensor, pairs: int) -> Tensor:
    """A view of the turning channels, [B, S, H, 2, P]."""
    return input_BSHD[..., : 2 * pairs].unflatten(-1, (2, pairs))  # type: ignore[no-any-return, no-untyped-call]
