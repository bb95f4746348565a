"""A stand-in for flex_attention compiled for a map of selected tiles."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention.flex_attention import BlockMask

from omni_attn.backends import flex_kernels
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.sparse_listed import attend_listed, block_rows


@contextmanager
def sparse_flex_stand_in(log: CallLog) -> Iterator[None]:
    """Puts it in place of what torch.compile makes; no Triton is asked for."""

    def compiled_attend(kind: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
        assert function is flex_kernels.attend_blocks
        log.calls.append("flex_attention")
        return _attend

    with (
        patch.object(flex_kernels, "compiled_attend", compiled_attend),
        patch.object(flex_kernels, "require_triton", lambda label: None),
    ):
        yield


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: BlockMask,
    tile: int,
    softmax_scale: float,
) -> torch.Tensor:
    """What the kernel computes: full tiles are not held against the rule, tiles on neither list are not looked at."""
    assert query.dtype == key.dtype == value.dtype
    assert min(query.shape[-1], value.shape[-1]) >= 16, "Triton multiplies at least 16 channels"
    assert set(block_mask.BLOCK_SIZE) == {tile} and tile in (64, 128)
    assert block_mask.seq_lengths == (query.shape[2], key.shape[2]), "the block mask is for other lengths"
    assert block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None
    # The compiled kernel reads the second list with the strides of the first one.
    assert block_mask.full_kv_indices.shape == block_mask.kv_indices.shape
    counts = (query.shape[2] // tile, key.shape[2] // tile)
    rows = torch.full((counts[1],), tile, dtype=torch.int32)
    partial = block_rows(block_mask.kv_indices, block_mask.kv_num_blocks, rows, tile, counts)
    full = block_rows(block_mask.full_kv_indices, block_mask.full_kv_num_blocks, rows, tile, counts)
    if query.is_meta:  # shapes alone
        return query.new_empty(*query.shape[:3], value.shape[-1])
    zero = torch.zeros(1, dtype=torch.int64)
    kept = block_mask.mask_mod(zero, zero, zero, torch.arange(key.shape[2]))

    def key_rows(b: int, h: int, block: int) -> torch.Tensor:
        in_part = partial(b, h, block)
        return torch.cat([in_part[kept[in_part]], full(b, h, block)])

    return attend_listed(query, key, value, tile, key_rows, softmax_scale)
