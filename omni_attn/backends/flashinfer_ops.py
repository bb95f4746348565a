"""FlashInfer's calls as opaque operators, for torch.compile. Their arguments are tensors, numbers and text alone.

A compiled layer that was never prepared builds its M while it is traced, so nothing of M is left when the operator
runs: plans are found anew by what the call looks like.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_attn.backends.flashinfer_kernels import kernels
from omni_attn.backends.flashinfer_masks import attend_masked
from omni_attn.backends.flashinfer_plans import Plan, find_plan, is_capturing, keep_captured
from omni_attn.backends.flashinfer_shapes import RaggedShape
from omni_attn.ops.segments import Segment


def _plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[int] | None,
    kv_lengths: Sequence[int] | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    fp8_values: bool,
    variant: str,
) -> Plan:
    shape = RaggedShape(
        num_heads=query.shape[2],
        num_kv_heads=key.shape[2],
        head_size=query.shape[3],
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        batch=query.shape[0],
        lengths=(query.shape[1], key.shape[1]),
        segments=None
        if segments is None
        else tuple(Segment(*segments[i : i + 4]) for i in range(0, len(segments), 4)),
        kv_lengths=None if kv_lengths is None else tuple(kv_lengths),
        fp8_values=fp8_values,
    )
    plan = find_plan(kernels[variant], shape, query, key, value)
    if is_capturing(query):
        keep_captured(plan)
    return plan


@torch.library.custom_op("omni_attn::flashinfer_ragged", mutates_args=())
def ragged_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[int] | None,
    kv_lengths: Sequence[int] | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    fp8_values: bool,
    variant: str,
) -> torch.Tensor:
    """Plan.attend; `segments` holds four numbers each."""
    geometry = (softmax_scale, causal, window_left, fp8_values, variant)
    return _plan(query, key, value, segments, kv_lengths, *geometry).attend(query, key, value)


@ragged_op.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("omni_attn::flashinfer_ragged_with_lse", mutates_args=())
def ragged_with_lse_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Sequence[int] | None,
    kv_lengths: Sequence[int] | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    fp8_values: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan.attend_with_lse; `segments` holds four numbers each."""
    geometry = (softmax_scale, causal, window_left, fp8_values, variant)
    return _plan(query, key, value, segments, kv_lengths, *geometry).attend_with_lse(query, key, value)


@ragged_with_lse_op.register_fake
def _(query: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length, heads, _size = query.shape
    return query.new_empty(query.shape), query.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("omni_attn::flashinfer_masked", mutates_args=())
def masked_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_mask: torch.Tensor,
    empty_rows: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """attend_masked."""
    single = kernels["fa2"].single
    assert single is not None
    return attend_masked(single, query, key, value, packed_mask, empty_rows, softmax_scale)


@masked_op.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)
