"""Block-sparse attention in Triton: any block size, half or single precision, grouped heads, on every GPU with Triton.

pack      one pass over query (means alone), key and value (means, and rows brought together)
attend    lists of the selected rows, then one kernel that reads queries, and writes outputs, in sequence order; with
          summaries, it goes on over the means of the blocks that nobody selected
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from omni_attn.ops.block_sparse.executor import (
    CoarseTerm,
    Packed,
    SelectedBlocks,
    SummarisingExecutor,
    add_coarse,
)
from omni_attn.ops.block_sparse.gradients import attend_with_gradients, means_with_gradient, needs_gradients
from omni_attn.ops.block_sparse.means import BlockMeans
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.triton_backward import attend_backward
from omni_attn.ops.block_sparse.triton_forward import attend
from omni_attn.ops.block_sparse.triton_pack import pack_rows
from omni_attn.ops.layout import unit_stride


class _Tensors(NamedTuple):
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_rows: torch.Tensor
    value_rows: torch.Tensor


class TritonExecutor(SummarisingExecutor):
    """Our kernels."""

    name: ClassVar[str] = "triton"
    differentiable: ClassVar[bool] = True

    def pack(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> Packed:
        """See Executor.pack."""
        query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
        _, query_means = pack_rows(query, query_blocks, write=False)
        key_rows, key_means = pack_rows(key, key_blocks)
        value_rows, value_means = pack_rows(value, key_blocks)
        assert query_means is not None and key_means is not None and value_means is not None
        assert key_rows is not None and value_rows is not None
        if needs_gradients(query, key, value):
            query_means = means_with_gradient(query, query_means, query_blocks)
            key_means = means_with_gradient(key, key_means, key_blocks)
            value_means = means_with_gradient(value, value_means, key_blocks)
        means = BlockMeans(query_means, key_means, value_means)
        return Packed(means, query_blocks, key_blocks, _Tensors(query, key, value, key_rows, value_rows))

    def attend(
        self,
        packed: Packed,
        selected: SelectedBlocks,
        softmax_scale: float,
        coarse: CoarseTerm | None = None,
    ) -> torch.Tensor:
        """See Executor.attend; scores and sums are float32.

        With gradients, the fine output is rounded before the coarse term is added: the backward reads it.
        """
        query, key, value = packed.tensors[:3]
        if not needs_gradients(query, key, value, *(coarse or ())):
            return attend(packed, selected, softmax_scale, coarse)[0]
        fine = _attend_with_gradients(packed, selected, softmax_scale)
        return add_coarse(fine, coarse, packed.query_blocks)

    def attend_with_summaries(
        self, packed: Packed, selected: SelectedBlocks, softmax_scale: float
    ) -> torch.Tensor:
        """See SummarisingExecutor; the means are rounded to the dtype of the tensors, whose rounding they share."""
        query, key, value = packed.tensors[:3]
        if not needs_gradients(query, key, value):
            return attend(packed, selected, softmax_scale, summaries=True)[0]
        return _attend_with_gradients(packed, selected, softmax_scale, summaries=True)


def _attend_with_gradients(
    packed: Packed, selected: SelectedBlocks, softmax_scale: float, *, summaries: bool = False
) -> torch.Tensor:
    query, key, value = packed.tensors[:3]
    return attend_with_gradients(
        lambda: attend(packed, selected, softmax_scale, summaries=summaries, with_lse=True),
        attend_backward,
        query,
        key,
        value,
        selected,
        packed.query_blocks,
        packed.key_blocks,
        softmax_scale,
        summaries=(packed.means.key, packed.means.value) if summaries else None,
    )
