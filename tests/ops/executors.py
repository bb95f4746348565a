"""The executors under test, and what their tests feed them. A further executor is a line in EXECUTORS."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, Protocol

import pytest
import torch
from hypothesis import Phase, settings

from omni_attn.ops.block_sparse.executor import CoarseTerm, Executor, SelectedBlocks
from omni_attn.ops.block_sparse.means import block_means, coarse_attention, coarse_scores
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.prefix_selector import prefix_dense_topk
from omni_attn.ops.block_sparse.selectors import mean_topk
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from tests.gpu.machine import on_gpu
from tests.ops.triton_here import INTERPRETED
from tests.ops.vsa_oracle import Selection

#: Of a test with random examples. The interpreter is slow: few of them, and no search for a smaller failure.
random_examples = settings(
    max_examples=10 if INTERPRETED else 30,
    phases=[Phase.explicit, Phase.generate] if INTERPRETED else list(Phase),
)

#: Absolute and relative tolerance against float64 of values about 1.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class ExecutorCase:
    """One executor on one device.

    Attributes:
        make: gives the executor.
        grain: head sizes are multiples of it.
    """

    name: str
    make: Callable[[], Executor]
    dtypes: tuple[torch.dtype, ...]
    device: str = "cpu"
    grain: int = 1

    def __str__(self) -> str:
        return self.name

    def head_size(self, least: int) -> int:
        """The smallest head size from `least` on that the executor takes."""
        return -(-least // self.grain) * self.grain

    def attend(
        self,
        tensors: Tensors,
        query_blocks: BlockPartition,
        key_blocks: BlockPartition,
        selection: Selection,
        scale: float,
        coarse: CoarseTerm | None = None,
        *,
        ignored: int = -1,
    ) -> torch.Tensor:
        """The output for a selection, with `ignored` in every place of the indices behind the counts."""
        executor = self.make()
        selected = as_tensors(selection, key_blocks.num_blocks, self.device, ignored)
        return executor.attend(
            executor.pack(*tensors, query_blocks, key_blocks), selected, softmax_scale=scale, coarse=coarse
        )

    def tensors(
        self,
        dtype: torch.dtype,
        queries: int,
        keys: int,
        *,
        batch: int = 1,
        heads: int = 1,
        kv_heads: int = 1,
        head_size: int = 16,
        value_size: int | None = None,
        seed: int = 0,
    ) -> Tensors:
        """Random query, key and value on the executor's device."""
        generator = torch.Generator().manual_seed(seed)
        size = self.head_size(head_size)
        shapes = (
            (batch, queries, heads, size),
            (batch, keys, kv_heads, size),
            (batch, keys, kv_heads, self.head_size(value_size or head_size)),
        )
        query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
        return query.to(self.device, dtype), key.to(self.device, dtype), value.to(self.device, dtype)


class Scores(Protocol):
    """See means.coarse_scores."""

    def __call__(
        self, query_means: torch.Tensor, key_means: torch.Tensor, softmax_scale: float
    ) -> torch.Tensor: ...


class PrefixSelector(Protocol):
    """See prefix_selector.prefix_dense_topk."""

    def __call__(
        self, scores: torch.Tensor, prefix_blocks: int, topk: int, *, compete: bool
    ) -> SelectedBlocks: ...


@dataclass(frozen=True)
class CoarseStage:
    """One implementation of block means and of what lies between them and a selection, on one device."""

    name: str
    means: Callable[[torch.Tensor, BlockPartition], torch.Tensor]
    scores: Scores
    select: Callable[[torch.Tensor, int], SelectedBlocks]
    prefix_select: PrefixSelector
    attention: Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    device: str = "cpu"


def triton() -> Executor:
    """Ours in Triton; imported when it is wanted, because a GPU or the interpreter must be there."""
    from omni_attn.ops.block_sparse.triton_executor import TritonExecutor

    return TritonExecutor()


def triton_stage(name: str, device: str) -> CoarseStage:
    """Triton's, whatever the device."""

    def named(module: str, function: str) -> Callable[..., Any]:
        return lambda *args, **options: getattr(
            import_module(f"omni_attn.ops.block_sparse.{module}"), function
        )(*args, **options)

    def prefix_select(scores: torch.Tensor, prefix: int, topk: int, *, compete: bool) -> SelectedBlocks:
        dense_rows = scores.shape[-2] - (scores.shape[-1] - prefix)
        kernel = named("triton_select", "prefix_dense_topk")
        selected: SelectedBlocks = kernel(scores, prefix, topk, dense_rows, compete=compete)
        return selected

    return CoarseStage(
        name,
        lambda tensor, blocks: named("triton_pack", "pack_rows")(tensor, blocks, write=False)[1],
        named("triton_select", "coarse_scores"),
        named("triton_select", "mean_topk"),
        prefix_select,
        named("triton_select", "coarse_attention"),
        device=device,
    )


_HALF = (torch.float16, torch.bfloat16)
_ON_CPU = [ExecutorCase("torch", TorchExecutor, (torch.float64, torch.float32, *_HALF))]
if INTERPRETED:
    # The interpreter multiplies bfloat16 matrices by their bits.
    _ON_CPU.append(ExecutorCase("triton interpreted", triton, (torch.float32, torch.float16), grain=16))
_ON_GPU = [
    ExecutorCase("torch on the GPU", TorchExecutor, (torch.float32, *_HALF), "cuda"),
    ExecutorCase("triton on the GPU", triton, (torch.float32, *_HALF), "cuda", grain=16),
]
# numpy warns about rows that a kernel masks, Triton on a GPU does not.
_on_cpu = pytest.mark.filterwarnings("ignore::RuntimeWarning") if INTERPRETED else ()
EXECUTORS = [pytest.param(case, id=case.name, marks=_on_cpu) for case in _ON_CPU]
EXECUTORS += [pytest.param(case, id=case.name, marks=on_gpu) for case in _ON_GPU]

_OURS = block_means, coarse_scores, mean_topk, prefix_dense_topk, coarse_attention
_FLOATS = torch.float32, torch.float64
_STAGES_ON_CPU = [CoarseStage("torch", *_OURS, _FLOATS)]
if INTERPRETED:
    _STAGES_ON_CPU.append(triton_stage("triton interpreted", "cpu"))
_STAGES_ON_GPU = [
    CoarseStage("ours on the GPU", *_OURS, _FLOATS, "cuda"),
    triton_stage("triton on the GPU", "cuda"),
]
COARSE_STAGES = [pytest.param(stage, id=stage.name, marks=_on_cpu) for stage in _STAGES_ON_CPU]
COARSE_STAGES += [pytest.param(stage, id=stage.name, marks=on_gpu) for stage in _STAGES_ON_GPU]


def stored_heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def stored_with_others(x: torch.Tensor) -> torch.Tensor:
    """A third of a fused projection, with NaN around it."""
    return torch.stack([torch.full_like(x, math.nan), x, torch.full_like(x, math.nan)], dim=2)[:, :, 1]


def stored_with_gaps(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.full_like(x, math.nan)], dim=-1)[..., 0]


def stored_once(x: torch.Tensor) -> torch.Tensor:
    """One batch entry for all."""
    return x[:1].expand_as(x)


def as_tensors(selection: Selection, cap: int, device: str, ignored: int = -1) -> SelectedBlocks:
    """A selection as an executor wants it."""
    rows = [[[list(row) + [ignored] * (cap - len(row)) for row in head] for head in b] for b in selection]
    counts = [[[len(row) for row in head] for head in b] for b in selection]
    return SelectedBlocks(
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.tensor(counts, dtype=torch.int32, device=device),
    )


def some_blocks(
    batch: int, heads: int, rows: int, blocks: int, *, seed: int = 0, least: int = 0, most: int | None = None
) -> Selection:
    """Random key blocks for each row, `least` to `most` of them."""
    chance = random.Random(seed)

    def row() -> list[int]:
        return sorted(chance.sample(range(blocks), chance.randint(least, min(most or blocks, blocks))))

    return [[[row() for _ in range(rows)] for _ in range(heads)] for _ in range(batch)]


def blocks_of(partition: BlockPartition) -> list[list[int]]:
    """A partition's blocks as lists of tokens."""
    order = partition.order.tolist()
    return [order[a:b] for a, b in pairwise(partition.offsets.tolist())]


def assert_near(output: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Within the tolerance of a dtype, by default the output's own."""
    tolerance = TOLERANCES[dtype or output.dtype]
    torch.testing.assert_close(output.detach().cpu().double(), expected, rtol=tolerance, atol=tolerance)
