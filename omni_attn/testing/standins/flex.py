"""A stand-in for the compiled flex_attention."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention.flex_attention import BlockMask

from omni_attn.backends import flex_kernels
from omni_attn.ops.reference import reference_attention
from omni_attn.testing.standins.log import CallLog


@contextmanager
def flex_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts it in place of what torch.compile makes; no Triton is asked for."""
    others = flex_kernels.compiled_attend

    def compiled_attend(
        kind: Hashable, function: Callable[..., Any] = flex_kernels.attend
    ) -> Callable[..., Any]:
        if function is not flex_kernels.attend:
            return others(kind, function)
        log.calls.append("flex_attention")
        return _attend

    with (
        patch.object(flex_kernels, "compiled_attend", compiled_attend),
        patch.object(flex_kernels, "require_triton", lambda *label: None),
    ):
        yield


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: BlockMask | None,
    bias: torch.Tensor | None,
    unused_keys: torch.Tensor | None,
    softmax_scale: float,
    with_lse: bool,
) -> Any:
    """What the kernel computes, with its quirks: tiles that the block mask leaves out are not looked at, full ones are
    not held against the rule, and weight 0 times NaN is NaN.
    """
    assert query.dtype == key.dtype == value.dtype
    assert min(query.shape[-1], value.shape[-1]) >= 16, "Triton multiplies at least 16 channels"
    assert min(query.shape[1], key.shape[1]) > 0, "flex_attention takes no empty sequence"
    if query.is_meta:  # shapes alone
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        return (output, query.new_empty(query.shape[:3]).transpose(1, 2)) if with_lse else output
    if unused_keys is not None:
        value = value.masked_fill(unused_keys, 0.0)
    batch, num_queries, heads, _ = query.shape
    index = torch.meshgrid(
        *(torch.arange(n) for n in (batch, heads, num_queries, key.shape[1])), indexing="ij"
    )
    mask = torch.ones(batch, heads, num_queries, key.shape[1], dtype=torch.bool)
    if block_mask is not None:
        mask = _seen(block_mask, index)
    if bias is not None:
        mask = bias.float().expand(mask.shape).masked_fill(~mask, float("-inf"))
    output, lse = reference_attention(query, key, value, softmax_scale=softmax_scale, attn_mask=mask)
    output = output.to(query.dtype)
    return (output, lse.float()) if with_lse else output


def _seen(block_mask: BlockMask, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Pairs that the kernel counts: those of full tiles, and in partial ones those that the rule keeps."""
    assert block_mask.seq_lengths == tuple(index[0].shape[2:]), "the block mask is for other lengths"
    kept = block_mask.mask_mod(*index).expand(index[0].shape)
    partial = _marked(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.BLOCK_SIZE, index)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        counts, numbers = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        full = _marked(counts, numbers, block_mask.BLOCK_SIZE, index)
    assert not bool((partial & full).any()), "a tile is partial and full"
    return full | (partial & kept)


def _marked(
    counts: torch.Tensor, numbers: torch.Tensor, tile: tuple[int, int], index: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    assert counts.dtype == numbers.dtype == torch.int32, "int32"
    assert counts.is_contiguous() and numbers.is_contiguous(), "the kernel reads them by offset"
    listed = torch.arange(numbers.shape[-1]) < counts[..., None]
    tiles = torch.zeros(numbers.shape, dtype=torch.bool).scatter(-1, numbers.long(), listed)
    b, h, q, k = index
    return tiles[b % tiles.shape[0], h % tiles.shape[1], q // tile[0], k // tile[1]]
