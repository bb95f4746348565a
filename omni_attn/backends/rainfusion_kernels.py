"""What runs the sparse steps of RAINFUSION_ATTN: our rules on a block-sparse executor, or MindIE-SD's own call."""

from __future__ import annotations

from typing import Protocol

import torch

from omni_attn.backends import sparse_executors
from omni_attn.backends.rainfusion_facts import MINDIE
from omni_attn.backends.rainfusion_mindie import MindieRainFusion
from omni_attn.ops.block_sparse.executor import Executor
from omni_attn.ops.block_sparse.rainfusion import RainFusionCall, rainfusion_blocks
from omni_attn.ops.block_sparse.selection import BlockSelection
from omni_attn.ops.rainfusion import rainfusion_attention, select_rainfusion_blocks


class RainFusionKernel(Protocol):
    """What runs the sparse steps."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: RainFusionCall,
    ) -> torch.Tensor:
        """[B, S, H, Dv] of query [B, S, H, D], key [B, S, G, D], value [B, S, G, Dv], the tokens in use."""

    def select(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: RainFusionCall,
    ) -> BlockSelection:
        """The blocks that `attend` computes with the same arguments."""


class OnExecutor:
    """Our own rules on a block-sparse executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: RainFusionCall,
    ) -> torch.Tensor:
        """See RainFusionKernel.attend."""
        blocks = rainfusion_blocks(call.layout, call.block_size, query.device)
        numbers = (call.sparsity, call.softmax_scale)
        return rainfusion_attention(self._executor, query, key, value, blocks, *numbers)

    def select(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: RainFusionCall,
    ) -> BlockSelection:
        """See RainFusionKernel.select."""
        blocks = rainfusion_blocks(call.layout, call.block_size, query.device)
        means = self._executor.pack(query, key, value, blocks.partition, blocks.partition).means
        selected = select_rainfusion_blocks(means, blocks, call.sparsity, call.softmax_scale)
        return BlockSelection(selected, blocks.partition, blocks.partition)


def load_kernel(variant: str, precision: str) -> tuple[RainFusionKernel, bool]:
    """What runs a variant, and whether gradients flow through it.

    Raises:
        BackendImportError: its package is missing, broken, or lacks what it is asked for.
    """
    label = f"RAINFUSION_ATTN ({variant})"
    if variant == MINDIE:
        return MindieRainFusion(label, precision), False
    executor = sparse_executors.make_executor(variant, label)
    return OnExecutor(executor), executor.differentiable
