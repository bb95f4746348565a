"""Block-sparse attention on FlashInfer's cute-dsl kernels: one for each generation of GPUs and size of blocks."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch

from omni_attn.backends import capability
from omni_attn.backends.optional_package import import_symbols
from omni_attn.backends.sparse_packages import flashinfer_package
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.rows import RowExecutor, Rows, repeat_heads


class Kernel(NamedTuple):
    """One function of the package.

    Attributes:
        module, function: where it is, under flashinfer.cute_dsl.sparse.
        unit: rows of its blocks, of queries and of keys.
        gqa: a key head may serve several query heads; else it is repeated for them.
    """

    module: str
    function: str
    unit: int
    gqa: bool


SM100_64 = Kernel("bsa_attn_sm100_blk64", "bsa_attn_sm100_blk64_fwd", 64, False)
SM100_128 = Kernel("bsa_attn_sm100_blk128", "bsa_attn_sm100_blk128_fwd", 128, True)
SM120_64 = Kernel("bsa_attn_sm120", "bsa_attn_sm120_blk64_fwd", 64, True)


def choose_kernel(major: int, *blocks: BlockPartition) -> Kernel:
    """The kernel for a compute capability and for blocks of a size: small ones would at most half fill 128 rows."""
    if major == 12:
        return SM120_64
    return SM100_128 if max(b.capacity for b in blocks) > 64 else SM100_64


class FlashInferExecutor(RowExecutor):
    """bsa_attn_*: head size 128, bfloat16, and float16 but for blocks of 64 on compute capability 10."""

    name: ClassVar[str] = "flashinfer"

    def __init__(self, label: str) -> None:
        self._functions: dict[str, Any] = {}
        for kernel in (SM100_64, SM100_128, SM120_64):
            package = flashinfer_package(kernel.module, kernel.function)
            self._functions |= import_symbols(label, package)

    def _units(
        self,
        device: torch.device,
        head_size: int,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> tuple[int, int]:
        unit = choose_kernel(capability.capability_major(device), query_blocks, key_blocks).unit
        return unit, unit

    def _run(self, rows: Rows, selected: SelectedBlocks, softmax_scale: float) -> torch.Tensor:
        major = capability.capability_major(rows.query.device)
        kernel = choose_kernel(major, rows.query_pieces.blocks, rows.key_pieces.blocks)
        key, value = (rows.key, rows.value) if kernel.gqa else repeat_heads(rows)
        lists = rows.query_pieces.per_piece(rows.key_pieces.pieces_of(selected))
        # Without a count for each row, the kernel for blocks of 128 takes even counts alone. It packs heads of a group
        # unless told otherwise, and packed heads would share one list.
        options = {"pack_gqa": False} if kernel is SM100_128 else {}
        output: torch.Tensor = self._functions[kernel.function](
            *(x.transpose(1, 2) for x in (rows.query, key, value)),
            lists.indices,
            lists.indices.shape[-1],
            block_sizes=rows.key_pieces.sizes,
            q2k_block_nums=lists.counts,
            softmax_scale=softmax_scale,
            **options,
        )[0]
        return output.transpose(1, 2)
