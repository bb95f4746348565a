"""Block-sparse attention on torch's flex_attention: the selected blocks are its map of tiles."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from omni_attn.backends import flex_kernels
from omni_attn.backends.flex_blocks import TILE, Keep
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.pieces import Pieces
from omni_attn.ops.block_sparse.rows import RowExecutor, Rows

_SMALL_TILE = 64


class FlexExecutor(RowExecutor):
    """flex_attention, compiled: half and single precision, head sizes from 16 on."""

    name: ClassVar[str] = "flex"

    def __init__(self, label: str) -> None:
        flex_kernels.require_triton(label)

    def _units(
        self,
        device: torch.device,
        head_size: int,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> tuple[int, int]:
        small = max(query_blocks.capacity, key_blocks.capacity) <= _SMALL_TILE
        return (_SMALL_TILE, _SMALL_TILE) if small else (TILE, TILE)

    def _run(self, rows: Rows, selected: SelectedBlocks, softmax_scale: float) -> torch.Tensor:
        query, key, value, query_pieces, key_pieces = rows
        ragged = query_pieces.per_piece(key_pieces.ragged_pieces_of(selected))
        whole = query_pieces.per_piece(key_pieces.whole_pieces_of(selected))
        unit = key_pieces.unit
        # The kernel takes the strides of the first list for both.
        width = max(ragged.indices.shape[-1], whole.indices.shape[-1])
        ragged_indices, whole_indices = (
            F.pad(chosen.indices, (0, width - chosen.indices.shape[-1])) for chosen in (ragged, whole)
        )
        block_mask = BlockMask.from_kv_blocks(
            ragged.counts,
            ragged_indices,
            whole.counts,
            whole_indices,
            BLOCK_SIZE=(unit, unit),
            mask_mod=_inside(key_pieces),
            seq_lengths=(query.shape[2], key.shape[2]),
            compute_q_blocks=False,  # of use in a backward pass alone
        )
        # All that makes torch compile again: one function has only so many compilations.
        kind = (
            *("blocks", unit, query.shape, key.shape, value.shape, query.dtype, query.device),
            *(width, softmax_scale, torch.is_inference_mode_enabled()),
        )
        compiled = flex_kernels.compiled_attend(kind, flex_kernels.attend_blocks)
        output: torch.Tensor = compiled(query, key, value, block_mask, unit, softmax_scale)
        return output


def _inside(pieces: Pieces) -> Keep:
    """The rule for tiles with fewer tokens than rows."""
    ends, unit = pieces.ends, pieces.unit

    def keep(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return k < ends[k // unit]

    return keep
