"""Gradients of the Triton kernels against autograd of the torch executor; started by test_triton_gradients.py."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch

from omni_attn.ops.block_sparse.executor import Executor, SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.block_sparse.triton_backward import Tile, Tiles, attend_backward
from omni_attn.ops.block_sparse.triton_executor import TritonExecutor
from omni_attn.ops.block_sparse.triton_groups import list_query_groups
from omni_attn.ops.video_sparse import video_sparse_attention
from omni_attn.ops.video_tiles import video_tiles

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SCALE = 0.3
#: Few large steps: the interpreter pays for each operation, whatever its size.
LARGE = Tiles(Tile(64, 64, 4, 1), Tile(64, 64, 4, 1))
TOLERANCES = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


class Case(NamedTuple):
    """One call: tensors in sequence order, partitions and a selection."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor
    selected: SelectedBlocks
    query_blocks: BlockPartition
    key_blocks: BlockPartition

    def attend(self) -> torch.Tensor:
        """Output of the torch executor."""
        executor = TorchExecutor()
        packed = executor.pack(self.query, self.key, self.value, self.query_blocks, self.key_blocks)
        return executor.attend(packed, self.selected, SCALE)

    def listed(self) -> torch.Tensor:
        """bool [B, H, query blocks, key blocks]."""
        indices, counts = self.selected
        chosen = torch.arange(indices.shape[-1], device=DEVICE) < counts[..., None]
        blocks = torch.arange(self.key_blocks.num_blocks, device=DEVICE)
        return (chosen[..., None] & (indices[..., None] == blocks)).any(-2)

    def lse(self) -> torch.Tensor:
        """float32 [B, H, Sq], from the whole matrix of scores."""
        key = self.key.float().repeat_interleave(self.query.shape[2] // self.key.shape[2], 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", self.query.float(), key) * SCALE
        seen = self.listed()[:, :, self.query_blocks.block_of][..., self.key_blocks.block_of]
        return scores.masked_fill(~seen, float("-inf")).logsumexp(-1)

    def backward(
        self, output: torch.Tensor, lse: torch.Tensor, tiles: Tiles | None = LARGE
    ) -> tuple[torch.Tensor, ...]:
        tensors = [self.query, self.key, self.value, output, self.grad]
        # Triton's interpreter multiplies bfloat16 matrices by their bits.
        widened = DEVICE == "cpu" and self.query.dtype == torch.bfloat16
        grads = attend_backward(
            *(x.float() if widened else x for x in tensors), lse, self.selected, self.query_blocks,
            self.key_blocks, SCALE, tiles=tiles,
        )  # fmt: skip
        return tuple(grad.bfloat16() for grad in grads) if widened else grads


def shuffled(sizes: list[int], capacity: int, generator: torch.Generator) -> BlockPartition:
    order = torch.randperm(sum(sizes), generator=generator)
    return BlockPartition.of(order, sizes, capacity, DEVICE)


def case(
    query_sizes: list[int],
    key_sizes: list[int],
    most: int,
    *,
    batch: int = 1,
    heads: int = 2,
    groups: int = 1,
    size: int = 16,
    value_size: int = 16,
    dtype: torch.dtype = torch.float32,
    capacities: tuple[int, int] = (32, 32),
    least: int = 0,
) -> Case:
    """Random tensors; each query block has `least` to `most` random key blocks."""
    generator = torch.Generator().manual_seed(7)
    query_blocks = shuffled(query_sizes, capacities[0], generator)
    key_blocks = shuffled(key_sizes, capacities[1], generator)

    def random(tokens: int, heads: int, size: int) -> torch.Tensor:
        return torch.randn(batch, tokens, heads, size, generator=generator).to(DEVICE, dtype)

    rows = (batch, heads, len(query_sizes))
    counts = torch.randint(least, most + 1, rows, generator=generator)
    indices = torch.rand(*rows, len(key_sizes), generator=generator).argsort(-1)[..., :most]
    behind = torch.arange(most) >= counts[..., None]
    # Whatever stands behind the counts is ignored.
    indices = indices.masked_fill(behind, 1_000_000).sort(-1).values.masked_fill(behind, -7)
    selected = SelectedBlocks(indices.to(DEVICE, torch.int32), counts.to(DEVICE, torch.int32))
    tokens, keys = query_blocks.tokens, key_blocks.tokens
    return Case(
        random(tokens, heads, size),
        random(keys, groups, size),
        random(keys, groups, value_size),
        random(tokens, heads, value_size),
        selected,
        query_blocks,
        key_blocks,
    )


CASES = {
    "ragged, grouped heads, batch 2": case([7, 16, 24, 3], [20, 5, 32, 1, 17], 3, batch=2, heads=4, groups=2),
    "blocks larger than a tile": case([64, 90], [130, 128, 3], 2, capacities=(100, 130)),
    "channels that are no power of two": case([16, 20], [32, 9], 2, size=48, value_size=32),
    "value wider than key": case([16, 20], [32, 9], 2, heads=1, value_size=80),
    "blocks of one token": case([1, 1, 1], [1, 1, 1, 1], 3, capacities=(1, 1)),
    "float16": case([30, 64], [64, 50], 2, dtype=torch.float16, capacities=(64, 64)),
    "bfloat16": case([30, 64], [64, 50], 2, dtype=torch.bfloat16, capacities=(64, 64)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_the_torch_executor(case: Case) -> None:
    wide = case._replace(**{name: getattr(case, name).float() for name in ("query", "key", "value", "grad")})
    inputs = [x.requires_grad_() for x in (wide.query, wide.key, wide.value)]
    output = wide.attend()
    expected = torch.autograd.grad(output, inputs, wide.grad)
    found = case.backward(output.detach().to(case.query.dtype), wide.lse().detach())
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == case.query.dtype and mine.is_contiguous()
        error = (mine - theirs).abs().max() / theirs.abs().max()
        assert error < TOLERANCES[case.query.dtype]


def test_tiles_change_nothing() -> None:
    case = CASES["blocks larger than a tile"]
    output, lse = case.attend(), case.lse()
    one, other = (case.backward(output, lse, tiles) for tiles in (LARGE, None))
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_what_nobody_listed_has_no_gradient() -> None:
    chosen = case([7, 16, 24], [20, 5, 32, 1], 1)
    grad_query, grad_key, grad_value = chosen.backward(chosen.attend(), chosen.lse())
    listed = chosen.listed()
    empty = ~listed.any(-1)[0, :, chosen.query_blocks.block_of].T  # [S, H]
    assert empty.any() and not grad_query[0][empty].any() and grad_query[0][~empty].any()
    unused = ~listed.any(2).any(1)[0, chosen.key_blocks.block_of]
    assert unused.any() and not grad_key[:, unused].any() and not grad_value[:, unused].any()


@pytest.mark.parametrize("poisoned", [0, 2])
def test_nan_stays_with_those_who_listed_it(poisoned: int) -> None:
    """Block 0 holds the row that fills up a step; block 2 is any other."""
    clean = case([17, 16, 24], [20, 5, 32, 17], 2, heads=1, least=1)
    clean.selected.indices[..., :] = torch.tensor([1, 3], device=DEVICE)
    clean.selected.indices[:, :, poisoned] = torch.tensor([0, 2], device=DEVICE)
    output, lse = clean.attend(), clean.lse()
    expected = clean.backward(output, lse)

    bad_queries = clean.query_blocks.block_of == poisoned
    bad_keys = (clean.key_blocks.block_of == 0) | (clean.key_blocks.block_of == 2)
    spoilt = clean._replace(
        **{
            name: getattr(clean, name).masked_fill(rows[:, None, None], float("nan"))
            for name, rows in (
                ("query", bad_queries),
                ("grad", bad_queries),
                ("key", bad_keys),
                ("value", bad_keys),
            )
        }
    )
    found = spoilt.backward(output, lse)
    for mine, theirs, bad in zip(found, expected, (bad_queries, bad_keys, bad_keys), strict=True):
        assert torch.equal(mine[:, ~bad], theirs[:, ~bad])


# Slots without a key do overflow, and are thrown away; only the interpreter tells.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_large_scores_overflow_nowhere() -> None:
    """A log-sum-exp far below zero: exp(0 - lse) of a slot without a key is beyond float32."""
    chosen = case([9, 16], [20, 5], 2, heads=1, least=2)
    chosen = chosen._replace(key=-chosen.query[:, :1].expand(-1, chosen.key.shape[1], -1, -1) * 90)
    chosen = chosen._replace(query=chosen.query[:, :1].expand_as(chosen.query) * 9)
    assert chosen.lse().max() < -150
    inputs = [x.clone().requires_grad_() for x in chosen[:3]]
    expected = torch.autograd.grad(Case(*inputs, *chosen[3:]).attend(), inputs, chosen.grad)
    for mine, theirs in zip(chosen.backward(chosen.attend(), chosen.lse()), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-2, rtol=1e-4)


def test_strided_tensors() -> None:
    dense = CASES["channels that are no power of two"]
    expected = dense.backward(dense.attend(), dense.lse())
    fused = torch.cat((dense.query, dense.query), -1)[..., : dense.query.shape[-1]]
    turned = dense.key.transpose(1, 3).contiguous().transpose(1, 3)
    strided = dense._replace(
        query=fused, key=turned, grad=dense.grad.transpose(1, 2).contiguous().transpose(1, 2)
    )
    for mine, theirs in zip(strided.backward(dense.attend(), dense.lse()), expected, strict=True):
        assert torch.equal(mine, theirs)
    summed = dense._replace(grad=torch.ones((), device=DEVICE).expand_as(dense.grad))
    ones = dense._replace(grad=torch.ones_like(dense.grad))
    both = (x.backward(dense.attend(), dense.lse()) for x in (summed, ones))
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


def test_lists_of_queries_are_the_inverse_of_the_selection() -> None:
    chosen = case([40, 16, 24, 3], [20, 5, 32, 1, 17], 3, batch=2, capacities=(40, 32))
    groups = list_query_groups(chosen.selected, chosen.query_blocks, 5, block_m=32)
    firsts, row = [], 0
    for size in chosen.query_blocks.sizes:
        firsts.append(row // 16)
        row += -(-size // 16) * 16
    for number, on in enumerate(chosen.listed().mT.flatten(0, 2).tolist()):
        start, end = groups.starts[number : number + 2].tolist()
        expected = [
            (firsts[block] + at // 16) * 32 + min(16, size - at)
            for block, size in enumerate(chosen.query_blocks.sizes)
            if on[block]
            for at in range(0, size, 16)
        ]
        entries = groups.entries[start:end].tolist()
        assert entries[: len(expected)] == expected and len(entries) == -(-len(expected) // 2) * 2
        assert all(entry % 32 == 0 for entry in entries[len(expected) :])


def test_the_executor_learns_like_the_torch_executor() -> None:
    """Of all four inputs, through means, coarse attention and gate."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, 3 * 5 * 6, heads, 16) for heads in (2, 1, 1, 2)]
    inputs = [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator).to(DEVICE)
    tiles = video_tiles((3, 5, 6), (3, 4, 4), torch.device(DEVICE))

    def learn(executor: Executor) -> tuple[torch.Tensor, ...]:
        query, key, value, gate = inputs
        output = video_sparse_attention(executor, query, key, value, tiles, 2, SCALE, gate=gate)
        return output, *torch.autograd.grad(output, inputs, weights)

    for mine, theirs in zip(learn(TritonExecutor()), learn(TorchExecutor()), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["query", "value", "gate"])
def test_one_input_alone_learns(name: str) -> None:
    tiles = video_tiles((2, 3, 4), (2, 2, 4), torch.device(DEVICE))
    inputs = {x: torch.ones(1, 24, 1, 16, device=DEVICE) for x in ("query", "key", "value", "gate")}
    inputs[name].requires_grad_()
    query, key, value, gate = inputs.values()
    output = video_sparse_attention(TritonExecutor(), query, key, value, tiles, 1, SCALE, gate=gate)
    [gradient] = torch.autograd.grad(output.sum(), inputs[name])
    assert gradient.shape == query.shape and gradient.isfinite().all()
    if name != "query":  # equal values: where a query looks does not matter
        assert gradient.any()


def test_a_second_derivative_is_refused() -> None:
    tiles = video_tiles((2, 3, 4), (2, 2, 4), torch.device(DEVICE))
    query = torch.ones(1, 24, 1, 16, device=DEVICE, requires_grad=True)
    output = video_sparse_attention(TritonExecutor(), query, query, query, tiles, 1, SCALE)
    [gradient] = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
