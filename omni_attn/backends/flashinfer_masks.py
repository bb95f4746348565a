"""Masked calls of FlashInfer (variant fa2): single_prefill_with_kv_cache with a packed mask, one item after the other.

That function needs no plan. The wrapper's own custom mask is not used: it places the items of a ready packed mask at
unpacked offsets, and packing one itself reads a size back from the device (flashinfer-python 0.6.2 and 0.6.18).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from omni_attn.backends.flashinfer_shapes import check_offsets
from omni_attn.ops.layout import unit_stride


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """A bool keep mask [B|1, 1, Sq, Sk] as uint8 [B|1, ceil(Sq * Sk / 8)], first key in the lowest bit."""
    bits = mask.flatten(1)
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[1] % 8))
    octets = padded.view(torch.uint8).view(bits.shape[0], -1, 8)
    packed = octets[..., 0].clone()
    for bit in range(1, 8):  # one bit at a time keeps the temporaries at an eighth of the mask
        packed |= octets[..., bit] << bit
    return packed


def attend_masked(
    single: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_mask: torch.Tensor,
    empty_rows: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Output [B, Sq, H, D] under a packed mask; empty_rows [B|1, Sq, 1, 1] come out as zeros.

    Args:
        single: FlashInfer's function for one sequence [S, H, D].

    Raises:
        MetadataError: a tensor is too large for the kernel's offsets.
    """
    outputs = []
    for item in range(query.shape[0]):
        rows = [unit_stride(tensor[item]) for tensor in (query, key, value)]
        check_offsets(*rows)
        own = packed_mask[item if packed_mask.shape[0] > 1 else 0]
        outputs.append(single(*rows, packed_custom_mask=own, sm_scale=softmax_scale, backend="fa2"))
    output = outputs[0][None] if len(outputs) == 1 else torch.stack(outputs)
    return output.masked_fill(empty_rows, 0.0)
