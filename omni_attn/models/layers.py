"""Layers and functions that more than one transformer is built from.

Mixed precision follows the published models: norms, modulation and gated residuals are computed in float32
and stored in the dtype of the residual stream. Tensor names end in their dimensions: B batch, S sequence, C
channels.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def multiply_add(addend: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """`addend + left * right` in the operands' common dtype (float32 if one is), stored as `dtype`.

    In eager inference that is one kernel which casts in registers; writing it with `.float()` would move each
    operand through memory once more. Autograd has no `out=`, and a compiler fuses the plain form itself.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.addcmul(addend, left, right).to(dtype)
    shape = torch.broadcast_shapes(addend.shape, left.shape, right.shape)  # type: ignore[no-untyped-call]
    return torch.addcmul(addend, left, right, out=addend.new_empty(shape, dtype=dtype))


def modulated_layer_norm(input_BSC: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`layer_norm(x) * (1 + scale) + shift` without learned weights, in float32, as x's dtype.

    Args:
        input_BSC: the residual stream.
        shift, scale: [B, 1, C], or [B, S, C] where every token has its own timestep; float32.
    """
    normed_BSC = F.layer_norm(input_BSC.float(), input_BSC.shape[-1:], eps=eps)
    return multiply_add(shift, normed_BSC, 1 + scale, input_BSC.dtype)


class Float32LayerNorm(nn.LayerNorm):
    """LayerNorm computed in float32 whatever the input's dtype, which the output keeps."""

    def forward(self, input: Tensor) -> Tensor:
        normed = F.layer_norm(
            input.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )
        return normed.to(input.dtype)


class FeedForward(nn.Module):
    """Linear, GELU, Linear. State-dict keys are those of diffusers: `net.0.proj` and `net.2`."""

    def __init__(self, dim: int, hidden_dim: int, out_dim: int, *, gelu: Literal["none", "tanh"]) -> None:
        super().__init__()
        first = nn.Sequential(OrderedDict(proj=nn.Linear(dim, hidden_dim), act=nn.GELU(approximate=gelu)))
        self.net = nn.Sequential(OrderedDict({"0": first, "2": nn.Linear(hidden_dim, out_dim)}))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.net(input)
        return output


class EmbeddingMLP(nn.Module):
    """Linear, activation, Linear, as `linear_1` and `linear_2`."""

    def __init__(self, in_dim: int, dim: int, activation: nn.Module, out_dim: int | None = None) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(in_dim, dim)
        self.activation = activation
        self.linear_2 = nn.Linear(dim, dim if out_dim is None else out_dim)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.linear_2(self.activation(self.linear_1(input)))
        return output


def timestep_sinusoid(timestep: Tensor, dim: int) -> Tensor:
    """Cosines, then sines, of the timestep at `dim / 2` frequencies from 1 down to almost 1 / 10000.

    Frequency i is `exp(-ln(10000) * i / (dim / 2))`; the timestep is used as it is, not rescaled.

    Args:
        timestep: any shape, any dtype.
        dim: even.

    Returns:
        [..., dim], float32.
    """
    half = dim // 2
    exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=timestep.device) / half
    angle = timestep[..., None].float() * exponent.exp()
    return torch.cat([angle.cos(), angle.sin()], dim=-1)
