"""The contract of an executor: what computes attention of query blocks over the key blocks selected for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from omni_attn.ops.block_sparse.means import BlockMeans
from omni_attn.ops.block_sparse.partition import BlockPartition


class SelectedBlocks(NamedTuple):
    """Key blocks of each query block.

    Attributes:
        indices: int32 [B, H, query blocks, cap]; the first counts entries ascend and are unique, the rest is ignored.
        counts: int32 [B, H, query blocks]; 0 gives rows of zeros.
    """

    indices: torch.Tensor
    counts: torch.Tensor


class CoarseTerm(NamedTuple):
    """What is added to each token's output: its block's coarse output, weighted.

    Attributes:
        output: [B, H, query blocks, Dv], float32 (or wider).
        gate: [B, Sq, H, Dv] in query's dtype, multiplied element by element; None = weight one.
    """

    output: torch.Tensor
    gate: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Packed:
    """One call's tensors, as the executor that made it wants them.

    Attributes:
        means: block means of query, key and value; made in the same pass.
        query_blocks, key_blocks: the partitions of query and key.
        tensors: the executor's own.
    """

    means: BlockMeans
    query_blocks: BlockPartition
    key_blocks: BlockPartition
    tensors: Any


class Executor(ABC):
    """Sequence order in, sequence order out; what lies between is the executor's own layout.

    Stateless but for the kernels that its constructor imports: one object serves every layer and device.
    """

    name: ClassVar[str]
    #: gradients of query, key, value, coarse output and gate flow through `pack` and `attend`.
    differentiable: ClassVar[bool] = False

    @abstractmethod
    def pack(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
    ) -> Packed:
        """Query [B, Sq, H, D], key [B, Sk, G, D], value [B, Sk, G, Dv], H a multiple of G; strided views are taken."""

    @abstractmethod
    def attend(
        self,
        packed: Packed,
        selected: SelectedBlocks,
        softmax_scale: float,
        coarse: CoarseTerm | None = None,
    ) -> torch.Tensor:
        """Attention of each query token over the tokens of the key blocks selected for its block and head.

        Returns:
            [B, Sq, H, Dv] in query's dtype, contiguous, in sequence order; the coarse term is added before rounding.
            Rows without a key are zeros (plus the coarse term).
        """


class SummarisingExecutor(Executor):
    """An executor that also lets the blocks nobody selected take part, each as one key."""

    @abstractmethod
    def attend_with_summaries(
        self, packed: Packed, selected: SelectedBlocks, softmax_scale: float
    ) -> torch.Tensor:
        """`attend`, with every key block that is not selected in the same softmax as one key.

        That key is the mean of the block's keys, and its scaled score gains ln(n) for its n tokens; its value
        is the mean of the block's values. Gradients flow through the means too, where the executor has any.
        """


def add_coarse(
    fine_BSHD: torch.Tensor, coarse: CoarseTerm | None, query_blocks: BlockPartition
) -> torch.Tensor:
    """The fine output with the coarse term added, for executors that cannot add it themselves."""
    if coarse is None:
        return fine_BSHD
    by_token = coarse.output.transpose(1, 2).index_select(1, query_blocks.block_of)
    weighted = by_token if coarse.gate is None else by_token * coarse.gate
    return (fine_BSHD + weighted).to(fine_BSHD.dtype)
