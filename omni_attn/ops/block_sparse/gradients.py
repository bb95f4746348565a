"""Gradients for executors whose kernels autograd cannot look into: of the fine attention, and of block means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.summary_gradients import summaries_backward

#: () -> output [B, Sq, H, Dv] and log-sum-exp, float32 [B, H, Sq], in sequence order; called without autograd.
Forward = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
#: See triton_backward.attend_backward.
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def needs_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd watches a call with these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def attend_with_gradients(
    forward: Forward,
    backward: Backward,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    selected: SelectedBlocks,
    query_blocks: BlockPartition,
    key_blocks: BlockPartition,
    softmax_scale: float,
    summaries: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """What `forward` gives, [B, Sq, H, Dv], with the gradients of `backward`; the selection has none.

    Add a coarse term behind it (executor.add_coarse), out of place: the backward reads the output.

    Args:
        summaries: means of keys and values, where the blocks that are not selected take part by them. `backward` is
            right about the selected ones all the same: output and log-sum-exp are those of all.
    """
    output: torch.Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        query,
        key,
        value,
        *(summaries or (None, None)),
        *selected,
        forward,
        backward,
        query_blocks,
        key_blocks,
        softmax_scale,
    )
    return output


def means_with_gradient(tensor: torch.Tensor, means: torch.Tensor, blocks: BlockPartition) -> torch.Tensor:
    """Block means [B, H, blocks, D] that a kernel took of a tensor [B, S, H, D], with their gradient.

    Each token of a block gets its share of its block's gradient.
    """
    attached: torch.Tensor = _Means.apply(tensor, means, blocks)  # type: ignore[no-untyped-call]
    return attached


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mean_keys: torch.Tensor | None,
        mean_values: torch.Tensor | None,
        indices: torch.Tensor,
        counts: torch.Tensor,
        forward: Forward,
        backward: Backward,
        *geometry: Any,
    ) -> torch.Tensor:
        output, lse = forward()
        assert lse is not None
        ctx.save_for_backward(query, key, value, mean_keys, mean_values, output, lse, indices, counts)
        ctx.backward_of, ctx.geometry = backward, geometry
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *means, output, lse, indices, counts = ctx.saved_tensors
        results = output, grad_output, lse, SelectedBlocks(indices, counts), *ctx.geometry
        grad_query, *others = ctx.backward_of(query, key, value, *results)
        if means[0] is not None:
            grad_summaries, *of_means = summaries_backward(query, *means, *results)
            grad_query = (grad_query + grad_summaries).to(query.dtype)
            others += of_means
        else:
            others += (None, None)
        return grad_query, *others, *(None,) * (4 + len(ctx.geometry))


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, means: torch.Tensor, blocks: BlockPartition) -> torch.Tensor:
        ctx.blocks, ctx.dtype = blocks, tensor.dtype
        return means.view_as(means)

    @staticmethod
    def backward(ctx: Any, grad_means: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shares = grad_means.transpose(1, 2) / ctx.blocks.block_sizes[:, None, None]
        return shares.index_select(1, ctx.blocks.block_of).to(ctx.dtype), None, None
