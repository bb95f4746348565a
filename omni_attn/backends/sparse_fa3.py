"""Block-sparse attention on FlashAttention 3: its paged cache reads any rows, so that selected blocks are pages.

Key and value lie head by head and block by block, without gaps, as pages of a few rows. Each query block of a head is
a sequence with one head, and its page table lists the pages of its selected blocks; the kernel neither sees nor loads
anything else, and takes the rows of small blocks together in one step.

Legend: B batch, H heads, G kv heads, D head size, N query blocks.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from omni_attn.backends.flash_kernels import first
from omni_attn.backends.optional_package import check_keywords, import_symbols
from omni_attn.backends.sparse_packages import FA3_PAGED_PACKAGES
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.kept import kept
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.pieces import Pieces, selected_tokens
from omni_attn.ops.block_sparse.rows import RowExecutor, Rows

#: Larger pages were not faster (8: 526 TFLOP/s, 16: 523, 1560: 500 on an H200), and fit fewer block sizes.
_LARGEST_PAGE = 16
_KEYWORDS = (
    *("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
    *("softmax_scale", "causal", "num_splits", "pack_gqa"),
)


class Fa3Executor(RowExecutor):
    """flash_attn_with_kvcache: float16 or bfloat16, value head size equal to that of query and key."""

    name: ClassVar[str] = "fa3"

    def __init__(self, label: str) -> None:
        package = FA3_PAGED_PACKAGES[0]
        self._kernel: Any = import_symbols(label, package)["flash_attn_with_kvcache"]
        check_keywords(label, package, self._kernel, *_KEYWORDS)

    def _units(
        self,
        device: torch.device,
        head_size: int,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> tuple[int, int]:
        return 1, page_size(key_blocks)

    def _run(self, rows: Rows, selected: SelectedBlocks, softmax_scale: float) -> torch.Tensor:
        batch, heads, _, size = rows.query.shape
        blocks, pages = rows.query_pieces.blocks, rows.key_pieces
        table = pages.pieces_of(selected, _first_pages(pages, batch, heads, rows.key.shape[1])).indices
        output = self._kernel(
            rows.query.view(-1, 1, size),
            rows.key.view(-1, pages.unit, 1, size),
            rows.value.view(-1, pages.unit, 1, size),
            cache_seqlens=selected_tokens(selected, pages.blocks).flatten(),
            page_table=table.flatten(0, 2),
            cu_seqlens_q=_boundaries(blocks, batch * heads),
            max_seqlen_q=blocks.capacity,
            softmax_scale=softmax_scale,
            causal=False,
            num_splits=1,
            pack_gqa=False,
        )
        return first(output).view(rows.query.shape)


def page_size(blocks: BlockPartition) -> int:
    """Rows of a page: a power of two that divides each block but the last one.

    A list of blocks ascends, so that the last block ends it, and its last page may be read in part.
    """
    return math.gcd(_LARGEST_PAGE, *blocks.sizes[:-1])


@kept
def _first_pages(pages: Pieces, batch: int, heads: int, groups: int) -> torch.Tensor:
    """int32 [B, H]: the first page of the key head that serves each query head."""
    group = torch.arange(heads, device=pages.device, dtype=torch.int32) // (heads // groups)
    item = torch.arange(batch, device=pages.device, dtype=torch.int32)[:, None]
    return (item * groups + group) * pages.num_pieces


@kept
def _boundaries(blocks: BlockPartition, repeats: int) -> torch.Tensor:
    """int32 [repeats * N + 1]: where each block starts, for `repeats` copies of the sequence one behind the other."""
    starts = torch.arange(repeats, device=blocks.device, dtype=torch.int32)[:, None]
    return F.pad((starts * blocks.tokens + blocks.offsets[1:]).flatten(), (1, 0))
