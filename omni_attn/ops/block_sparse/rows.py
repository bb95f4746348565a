"""Executors on kernels that want their rows block by block: the two passes around such a kernel, there and back."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from omni_attn.ops.block_sparse.executor import CoarseTerm, Executor, Packed, SelectedBlocks, add_coarse
from omni_attn.ops.block_sparse.kernels import kernels_for
from omni_attn.ops.block_sparse.means import BlockMeans, block_means
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.pieces import Pieces, cut
from omni_attn.ops.layout import unit_stride


class Rows(NamedTuple):
    """Rows that lie head by head, [B, H or G, pieces * unit, D], contiguous, and how they are cut."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    query_pieces: Pieces
    key_pieces: Pieces


class RowExecutor(Executor):
    """An executor that hands such rows to a kernel; no gradients flow through it."""

    @torch.no_grad()
    def pack(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> Packed:
        """See Executor.pack."""
        head_size = max(query.shape[-1], value.shape[-1])
        query_unit, key_unit = self._units(query.device, head_size, query_blocks, key_blocks)
        query_pieces, key_pieces = cut(query_blocks, query_unit), cut(key_blocks, key_unit)
        query_rows, query_means = gather_rows(query, query_pieces)
        key_rows, key_means = gather_rows(key, key_pieces)
        value_rows, value_means = gather_rows(value, key_pieces)
        means = BlockMeans(query_means, key_means, value_means)
        rows = Rows(query_rows, key_rows, value_rows, query_pieces, key_pieces)
        return Packed(means, query_blocks, key_blocks, rows)

    @torch.no_grad()
    def attend(
        self,
        packed: Packed,
        selected: SelectedBlocks,
        softmax_scale: float,
        coarse: CoarseTerm | None = None,
    ) -> torch.Tensor:
        """See Executor.attend; the kernel rounds its output before the coarse term is added."""
        rows: Rows = packed.tensors
        return restore_rows(self._run(rows, selected, softmax_scale), rows.query_pieces, coarse)

    @abstractmethod
    def _units(
        self,
        device: torch.device,
        head_size: int,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> tuple[int, int]:
        """Rows of the kernel's blocks of queries and of keys; head_size: the larger one of key and value."""

    @abstractmethod
    def _run(self, rows: Rows, selected: SelectedBlocks, softmax_scale: float) -> torch.Tensor:
        """The kernel's output [B, H, query rows, Dv] of any strides; rows behind a block's tokens hold anything."""


def gather_rows(tensor_BSHD: torch.Tensor, pieces: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S, H, D] of any strides -> rows [B, H, pieces * unit, D], contiguous, and block means [B, H, blocks, D]."""
    if (kernels := kernels_for(tensor_BSHD)) is not None:
        layout = (pieces.first_rows, pieces.num_pieces * pieces.unit)
        return kernels.pack_rows(unit_stride(tensor_BSHD), pieces.blocks, layout=layout)  # type: ignore[no-any-return]
    rows = tensor_BSHD.transpose(1, 2).index_select(2, pieces.tokens)
    return rows, block_means(tensor_BSHD, pieces.blocks)


def restore_rows(rows_BHRD: torch.Tensor, pieces: Pieces, coarse: CoarseTerm | None) -> torch.Tensor:
    """Rows [B, H, pieces * unit, D] of any strides -> [B, S, H, D], contiguous, with the coarse term added."""
    if (kernels := kernels_for(rows_BHRD)) is not None:
        return kernels.unpack_rows(rows_BHRD, pieces, coarse)  # type: ignore[no-any-return]
    fine = rows_BHRD.transpose(1, 2).index_select(1, pieces.rows)
    return add_coarse(fine, coarse, pieces.blocks).contiguous()


def repeat_heads(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value rows once for each query head, for kernels that know no grouped heads."""
    repeats = rows.query.shape[1] // rows.key.shape[1]
    if repeats == 1:
        return rows.key, rows.value
    return rows.key.repeat_interleave(repeats, dim=1), rows.value.repeat_interleave(repeats, dim=1)
