"""Block-sparse attention on FlashAttention 4: its lists of key blocks, whole ones apart from those with a mask.

A block of n tokens is ceil(n / 128) blocks of the kernel, so that padding costs at most the rest of one. Whole ones go
unmasked; for the others the kernel asks a rule, written in its own language, whether a row holds a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from omni_attn.backends import capability
from omni_attn.backends.optional_package import check_keywords, import_symbols
from omni_attn.backends.sparse_packages import (
    CUTE_PACKAGE,
    CUTLASS_PACKAGE,
    FA4_LISTS_PACKAGE,
    FA4_SPARSE_PACKAGE,
    FA4_UTILS_PACKAGE,
)
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.rows import RowExecutor, Rows

_KEYWORDS = ("softmax_scale", "mask_mod", "aux_tensors", "block_sparse_tensors", "pack_gqa")


class Fa4Executor(RowExecutor):
    """flash_attn.cute: float16 or bfloat16, compute capability 9 to 11."""

    name: ClassVar[str] = "fa4"

    def __init__(self, label: str) -> None:
        self._kernel: Any = import_symbols(label, FA4_SPARSE_PACKAGE)["flash_attn_func"]
        check_keywords(label, FA4_SPARSE_PACKAGE, self._kernel, *_KEYWORDS)
        self._lists: Any = import_symbols(label, FA4_LISTS_PACKAGE)["BlockSparseTensorsTorch"]
        self._rule = functools.cache(_rule_writer(label))

    def _units(
        self,
        device: torch.device,
        head_size: int,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> tuple[int, int]:
        return kernel_blocks(capability.capability_major(device), head_size)

    def _run(self, rows: Rows, selected: SelectedBlocks, softmax_scale: float) -> torch.Tensor:
        keys = rows.key_pieces
        ragged = rows.query_pieces.per_piece(keys.ragged_pieces_of(selected))
        whole = rows.query_pieces.per_piece(keys.whole_pieces_of(selected))
        output: torch.Tensor = self._kernel(
            *(x.transpose(1, 2) for x in (rows.query, rows.key, rows.value)),
            softmax_scale=softmax_scale,
            mask_mod=self._rule(keys.unit),
            aux_tensors=[keys.ends],
            block_sparse_tensors=self._lists(
                mask_block_cnt=ragged.counts,
                mask_block_idx=ragged.indices,
                full_block_cnt=whole.counts,
                full_block_idx=whole.indices,
                block_size=(rows.query_pieces.unit, keys.unit),
            ),
            pack_gqa=False,  # packed heads would share one list
        )[0]
        return output.transpose(1, 2)


def kernel_blocks(major: int, head_size: int) -> tuple[int, int]:
    """Rows of a block of queries and of keys, as version 4.0.0b36 chooses its tiles.

    On capability 10 and 11 two tiles of queries share a list. On 9, heads above 128 have key tiles that are no power of
    two, and take the next smaller block that they are given.
    """
    if major >= 10:
        return 256, 128
    return 128, 128 if head_size <= 128 else 64


def _rule_writer(label: str) -> Callable[[int], Callable[..., Any]]:
    """What makes the rule for key blocks of a number of rows; imports what rules are written in."""
    scalar_to_ssa = import_symbols(label, FA4_UTILS_PACKAGE)["scalar_to_ssa"]
    int32 = import_symbols(label, CUTLASS_PACKAGE)["Int32"]
    jit = import_symbols(label, CUTE_PACKAGE)["jit"]

    def write(unit: int) -> Callable[..., Any]:
        # Compiled from its source text: no annotations, and all names it knows are those of this function.
        def holds_token(batch, head, query_row, key_row, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
            block = key_row // scalar_to_ssa(unit, int32)
            end = scalar_to_ssa(aux_tensors[0][block[0]], int32)
            return key_row < end

        rule: Callable[..., Any] = jit(holds_token)
        return rule

    return write
