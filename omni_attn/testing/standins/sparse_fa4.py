"""A stand-in for FlashAttention 4's block sparsity, and for the language its rules are written in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from omni_attn.backends import capability
from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.sparse_listed import attend_listed, block_rows


class BlockSparseTensorsStandIn(NamedTuple):
    """BlockSparseTensorsTorch, as far as a forward pass over dense batches reads it."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None


@contextmanager
def sparse_fa4_stand_in(log: CallLog, major: int = 9) -> Iterator[None]:
    """Puts the modules in place, on a GPU of a compute capability."""

    def flash_attn_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        mask_mod: Callable[..., torch.Tensor] | None = None,
        aux_tensors: list[torch.Tensor] | None = None,
        block_sparse_tensors: BlockSparseTensorsStandIn | None = None,
        pack_gqa: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """[B, S, H, D] over lists of blocks; the form with lists and a rule alone."""
        log.calls.append("flash_attn_func")
        assert mask_mod is not None and aux_tensors is not None and block_sparse_tensors is not None
        assert softmax_scale is not None and pack_gqa is False
        assert all(x.stride(-1) == 1 and x.dtype == q.dtype for x in (q, k, v))
        _check_blocks(block_sparse_tensors, q, max(q.shape[-1], v.shape[-1]), major)
        lists = block_sparse_tensors
        assert lists.full_block_cnt is not None and lists.full_block_idx is not None and lists.block_size
        unit = lists.block_size[1]
        assert k.shape[1] % unit == 0, "rows behind the last whole block"
        counts = (q.shape[1] // lists.block_size[0], k.shape[1] // unit)
        rows = torch.full((counts[1],), unit, dtype=torch.int32)
        masked = block_rows(lists.mask_block_idx, lists.mask_block_cnt, rows, unit, counts)
        whole = block_rows(lists.full_block_idx, lists.full_block_cnt, rows, unit, counts)
        if q.is_meta:  # shapes alone
            return q.new_empty(*q.shape[:3], v.shape[-1]), None
        zero = torch.zeros(1, dtype=torch.int32)
        judged = [mask_mod(zero, zero, zero, zero + row, None, aux_tensors) for row in range(k.shape[1])]
        kept = torch.cat(judged)

        def key_rows(b: int, h: int, block: int) -> torch.Tensor:
            in_part = masked(b, h, block)
            return torch.cat([in_part[kept[in_part]], whole(b, h, block)])

        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        output = attend_listed(query, key, value, lists.block_size[0], key_rows, softmax_scale)
        return output.transpose(1, 2).contiguous(), None

    modules: dict[str, dict[str, Any]] = {
        "flash_attn.cute": {"flash_attn_func": flash_attn_func},
        "flash_attn.cute.block_sparsity": {"BlockSparseTensorsTorch": BlockSparseTensorsStandIn},
        "flash_attn.cute.utils": {"scalar_to_ssa": _scalar_to_ssa},
        "cutlass": {"Int32": torch.int32},
        "cutlass.cute": {"jit": lambda function: function},
    }
    with ExitStack() as stack:
        for name, symbols in modules.items():
            stack.enter_context(fake_package(name, **symbols))
        stack.enter_context(patch.object(capability, "capability_major", lambda device: major))
        yield


def _check_blocks(lists: BlockSparseTensorsStandIn, q: torch.Tensor, head_size: int, major: int) -> None:
    """What interface.py and block_sparsity.py ask of block sizes, with the tiles they choose."""
    assert lists.block_size is not None
    query_unit, key_unit = lists.block_size
    if major in (10, 11):
        assert query_unit % (2 * 128) == 0, "two tiles of queries share a list"
        assert key_unit % 128 == 0
        return
    assert query_unit % 128 == 0
    tile = 128 if head_size <= 128 else 112 if head_size <= 192 else 80
    tile = key_unit if key_unit < tile and key_unit % 16 == 0 else tile
    assert key_unit == tile, f"key blocks of {key_unit} rows do not match tiles of {tile}"


def _scalar_to_ssa(number: Any, dtype: torch.dtype) -> torch.Tensor:
    """A vector of one."""
    assert not isinstance(number, torch.Tensor) or number.dim() == 0, "takes a scalar"
    return torch.as_tensor(number, dtype=dtype)[None]
