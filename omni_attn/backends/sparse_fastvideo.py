"""Block-sparse attention on FastVideo's kernel: blocks of 64 rows; larger blocks are several of them."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from omni_attn.backends.optional_package import import_symbols
from omni_attn.backends.sparse_packages import FASTVIDEO_PACKAGE
from omni_attn.errors import MetadataError
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.rows import RowExecutor, Rows, repeat_heads

_UNIT = 64


class FastVideoExecutor(RowExecutor):
    """block_sparse_attn_from_indices: bfloat16, head sizes 64 and 128, softmax scale head_size ** -0.5.

    Which of its kernels runs, Triton's or one for the GPU at hand, the package decides.
    """

    name: ClassVar[str] = "fastvideo"

    def __init__(self, label: str) -> None:
        self._label = label
        [name] = FASTVIDEO_PACKAGE.symbols
        self._kernel: Any = import_symbols(label, FASTVIDEO_PACKAGE)[name]

    def _units(
        self,
        device: torch.device,
        head_size: int,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> tuple[int, int]:
        return _UNIT, _UNIT

    def _run(self, rows: Rows, selected: SelectedBlocks, softmax_scale: float) -> torch.Tensor:
        """See RowExecutor.

        Raises:
            MetadataError: another softmax scale than the kernel's.
        """
        own_scale = rows.query.shape[-1] ** -0.5
        if not math.isclose(softmax_scale, own_scale, rel_tol=1e-6):
            raise MetadataError(
                f"{self._label}: softmax_scale {softmax_scale:g} was asked for, and the kernel of fastvideo-kernel "
                f"always takes head_size ** -0.5 = {own_scale:g}; choose another variant"
            )
        lists = rows.query_pieces.per_piece(rows.key_pieces.pieces_of(selected))
        output: torch.Tensor = self._kernel(
            rows.query, *repeat_heads(rows), lists.indices, lists.counts, rows.key_pieces.sizes
        )[0]
        return output
