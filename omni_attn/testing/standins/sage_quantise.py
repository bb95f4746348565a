"""What FlashInfer's SAGE quantiser computes, and what its kernels make of the scales, in float32 on the CPU.

Scales lie as in its sources: of query and key [H, ceil(T / block) + N - 1], where block j of sequence n that starts at
token t stands at t // block + n + j; of value [G, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

Bounds = tuple[list[int], list[int]]
_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST = 1e-3  # no scale is made of less


def sage_quantise(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: tuple[int, int],
    dtype: torch.dtype,
    bounds: Bounds,
) -> tuple[torch.Tensor, ...]:
    """Quantised query, key and value [T, H, D], and their scales in float32."""
    made, scales = [], []
    for tensor, block, cu in zip(qkv[:2], blocks, bounds, strict=True):
        assert tensor.dim() == 3 and tensor.is_contiguous() and block in (1, 4, 16)
        index = _block_index(cu, block, len(tensor))
        scale = torch.full((tensor.shape[1], -(-len(tensor) // block) + len(cu) - 2), _SMALLEST)
        amax = tensor.float().abs().amax(-1).T  # [H, T]
        scale = scale.scatter_reduce(1, index.expand_as(amax), amax, "amax") / _LIMITS[dtype]
        spread = tensor.float() / scale[:, index].T[..., None]
        made.append((spread.round() if dtype == torch.int8 else spread).to(dtype))
        scales.append(scale)
    value = qkv[2]
    v_scale = value.float().abs().amax(0).clamp(min=_SMALLEST) / 448.0
    made.append((value.float() / v_scale).to(torch.float8_e4m3fn))
    return (*made, *scales, v_scale)


def dequantise(
    qkv: tuple[torch.Tensor, ...],
    scales: Sequence[torch.Tensor | None],
    blocks: tuple[int, int],
    bounds: Bounds,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value in bfloat16, as the kernels' arithmetic sees them."""
    q_scale, k_scale, p_scale, v_scale = scales
    assert q_scale is not None and k_scale is not None and v_scale is not None and p_scale is None
    assert qkv[0].dtype == qkv[1].dtype and qkv[0].dtype in _LIMITS and qkv[2].dtype == torch.float8_e4m3fn
    wide = []
    for tensor, scale, block, cu in zip(qkv[:2], (q_scale, k_scale), blocks, bounds, strict=True):
        assert scale.shape == (tensor.shape[1], -(-len(tensor) // block) + len(cu) - 2)
        index = _block_index(cu, block, len(tensor))
        wide.append((tensor.float() * scale[:, index].T[..., None]).bfloat16())
    assert v_scale.shape == qkv[2].shape[1:]
    return wide[0], wide[1], (qkv[2].float() * v_scale).bfloat16()


def _block_index(cu: list[int], block: int, tokens: int) -> torch.Tensor:
    """Where the scale of each token stands."""
    assert cu[-1] == tokens, "boundaries cover the tokens"
    index = [
        start // block + number + local // block
        for number, (start, end) in enumerate(pairwise(cu))
        for local in range(end - start)
    ]
    return torch.tensor(index, dtype=torch.int64)
