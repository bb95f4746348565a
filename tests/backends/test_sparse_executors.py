"""Executors on other people's kernels, on stand-ins, against the torch executor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from omni_attn.backends import flex_kernels
from omni_attn.backends.sparse_fa3 import Fa3Executor, page_size
from omni_attn.backends.sparse_fa4 import Fa4Executor
from omni_attn.backends.sparse_fastvideo import FastVideoExecutor
from omni_attn.backends.sparse_flashinfer import FlashInferExecutor
from omni_attn.backends.sparse_flex import FlexExecutor
from omni_attn.errors import BackendImportError, MetadataError
from omni_attn.ops.block_sparse.executor import CoarseTerm, Executor, SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.video_sparse import video_sparse_attention
from omni_attn.ops.video_tiles import Extent, video_tiles
from omni_attn.testing import fake_package
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.sparse_fa3 import sparse_fa3_stand_in
from omni_attn.testing.standins.sparse_fa4 import sparse_fa4_stand_in
from omni_attn.testing.standins.sparse_fastvideo import sparse_fastvideo_stand_in
from omni_attn.testing.standins.sparse_flashinfer import sparse_flashinfer_stand_in
from omni_attn.testing.standins.sparse_flex import sparse_flex_stand_in

CPU = torch.device("cpu")


class Provider(NamedTuple):
    executor: Callable[[str], Executor]
    stand_in: Callable[[CallLog], AbstractContextManager[None]]
    head_size: int = 64


PROVIDERS = {
    "fa3": Provider(Fa3Executor, sparse_fa3_stand_in),
    "fa4": Provider(Fa4Executor, sparse_fa4_stand_in),
    "fa4, capability 10": Provider(Fa4Executor, functools.partial(sparse_fa4_stand_in, major=10)),
    "fa4, head size 192": Provider(Fa4Executor, sparse_fa4_stand_in, 192),
    "fastvideo": Provider(FastVideoExecutor, sparse_fastvideo_stand_in),
    "flashinfer, capability 10": Provider(FlashInferExecutor, sparse_flashinfer_stand_in, 128),
    "flashinfer, capability 12": Provider(
        FlashInferExecutor, functools.partial(sparse_flashinfer_stand_in, major=12), 128
    ),
    "flex": Provider(FlexExecutor, sparse_flex_stand_in),
}
#: Grid and tile: ragged along each axis, tiles of 8 to 256 tokens, all whole, one tile alone, one token alone.
TILINGS: list[tuple[Extent, Extent]] = [
    ((5, 7, 9), (4, 4, 4)),
    ((5, 9, 20), (4, 8, 8)),
    ((3, 5, 7), (2, 2, 2)),
    ((4, 8, 8), (4, 4, 4)),
    ((3, 8, 20), (2, 4, 16)),
    ((2, 5, 3), (4, 8, 8)),
    ((1, 1, 1), (4, 4, 4)),
]


class Made(NamedTuple):
    executor: Executor
    head_size: int
    log: CallLog


@pytest.fixture(params=PROVIDERS)
def made(request: pytest.FixtureRequest) -> Iterator[Made]:
    provider = PROVIDERS[request.param]
    log = CallLog()
    with provider.stand_in(log):
        yield Made(provider.executor("A_BACKEND"), provider.head_size, log)


def tensors(batch: int, tokens: int, heads: int, groups: int, size: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens, h, size, generator=generator) for h in (heads, groups, groups)]


def random_choice(batch: int, heads: int, blocks: tuple[int, int], cap: int, seed: int = 0) -> SelectedBlocks:
    """Any number of key blocks from 0 to cap for each query block; what lies behind the counts is no block's number."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.rand(batch, heads, *blocks, generator=generator).argsort(-1)
    counts = torch.randint(0, cap + 1, rank.shape[:3], generator=generator, dtype=torch.int32)
    counts[0, 0, 0] = cap
    counts[-1, -1, -1] = 0
    chosen = rank < counts[..., None]  # exactly counts of them, anywhere
    order = (~chosen).to(torch.int8).sort(dim=-1, stable=True).indices[..., :cap]
    behind = torch.arange(cap) >= counts[..., None]
    return SelectedBlocks(order.masked_fill(behind, -1).to(torch.int32), counts)


def attend(
    executor: Executor,
    qkv: list[torch.Tensor],
    blocks: tuple[BlockPartition, BlockPartition],
    selected: SelectedBlocks,
    coarse: CoarseTerm | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    packed = executor.pack(*qkv, *blocks)
    scale = qkv[0].shape[-1] ** -0.5 if scale is None else scale
    return executor.attend(packed, selected, scale, coarse)


@pytest.mark.parametrize(("grid", "tile"), TILINGS)
def test_as_torch(made: Made, grid: Extent, tile: Extent) -> None:
    tiles = video_tiles(grid, tile, CPU)
    qkv = tensors(2, tiles.tokens, 4, 2, made.head_size)
    cap = min(5, tiles.num_blocks)
    selected = random_choice(2, 4, (tiles.num_blocks, tiles.num_blocks), cap)
    output = attend(made.executor, qkv, (tiles, tiles), selected)
    expected = attend(TorchExecutor(), qkv, (tiles, tiles), selected)
    assert output.shape == expected.shape and output.is_contiguous() and output.dtype == qkv[0].dtype
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)
    assert len(made.log) == 1


def test_all_blocks(made: Made) -> None:
    tiles = video_tiles((5, 7, 9), (4, 4, 4), CPU)
    qkv = tensors(1, tiles.tokens, 2, 2, made.head_size)
    outputs = [
        video_sparse_attention(executor, *qkv, tiles, tiles.num_blocks, made.head_size**-0.5)
        for executor in (made.executor, TorchExecutor())
    ]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)


def test_means(made: Made) -> None:
    tiles = video_tiles((5, 7, 9), (4, 4, 4), CPU)
    qkv = tensors(2, tiles.tokens, 4, 2, made.head_size)
    means, expected = (e.pack(*qkv, tiles, tiles).means for e in (made.executor, TorchExecutor()))
    for found, wanted in zip(means, expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted)


def test_other_keys_than_queries(made: Made) -> None:
    """Key blocks of another sequence, with a last block that no power of two divides."""
    blocks = (video_tiles((3, 5, 7), (2, 4, 4), CPU), BlockPartition.in_order(333, 48, CPU))
    query = tensors(2, blocks[0].tokens, 2, 1, made.head_size)[0]
    _, key, value = tensors(2, 333, 2, 1, made.head_size, seed=1)
    selected = random_choice(2, 2, (blocks[0].num_blocks, blocks[1].num_blocks), 4)
    output = attend(made.executor, [query, key, value], blocks, selected)
    expected = attend(TorchExecutor(), [query, key, value], blocks, selected)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


def test_no_block_is_zeros(made: Made) -> None:
    tiles = video_tiles((4, 4, 9), (4, 4, 4), CPU)
    qkv = tensors(1, tiles.tokens, 2, 2, made.head_size)
    nothing = SelectedBlocks(
        torch.zeros(1, 2, tiles.num_blocks, 2, dtype=torch.int32),
        torch.zeros(1, 2, tiles.num_blocks, dtype=torch.int32),
    )
    assert torch.equal(attend(made.executor, qkv, (tiles, tiles), nothing), torch.zeros_like(qkv[0]))


@pytest.mark.parametrize("gated", [False, True])
def test_coarse_term(made: Made, gated: bool) -> None:
    tiles = video_tiles((5, 7, 9), (4, 4, 4), CPU)
    qkv = tensors(2, tiles.tokens, 4, 2, made.head_size)
    gate = tensors(2, tiles.tokens, 4, 2, made.head_size, seed=3)[0] if gated else None
    coarse = CoarseTerm(torch.randn(2, 4, tiles.num_blocks, made.head_size), gate)
    selected = random_choice(2, 4, (tiles.num_blocks, tiles.num_blocks), 3)
    output = attend(made.executor, qkv, (tiles, tiles), selected, coarse)
    expected = attend(TorchExecutor(), qkv, (tiles, tiles), selected, coarse)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


def test_half_precision(made: Made) -> None:
    tiles = video_tiles((5, 7, 9), (4, 4, 4), CPU)
    qkv = [x.bfloat16() for x in tensors(1, tiles.tokens, 2, 1, made.head_size)]
    selected = random_choice(1, 2, (tiles.num_blocks, tiles.num_blocks), 3)
    coarse = CoarseTerm(torch.randn(1, 2, tiles.num_blocks, made.head_size), qkv[0])
    output = attend(made.executor, qkv, (tiles, tiles), selected, coarse)
    expected = attend(TorchExecutor(), qkv, (tiles, tiles), selected, coarse)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, atol=3e-2, rtol=2e-2)


def test_strided_inputs_stay_as_they_are(made: Made) -> None:
    tiles = video_tiles((5, 7, 9), (4, 4, 4), CPU)
    qkv = tensors(2, tiles.tokens, 4, 2, made.head_size)
    wide = [torch.cat([x, x.neg()], -1).transpose(1, 2).contiguous() for x in qkv]
    views = [x[..., : made.head_size].transpose(1, 2) for x in wide]
    before = [x.clone() for x in wide]
    selected = random_choice(2, 4, (tiles.num_blocks, tiles.num_blocks), 3)
    output = attend(made.executor, views, (tiles, tiles), selected)
    assert torch.equal(output, attend(made.executor, qkv, (tiles, tiles), selected))
    assert all(map(torch.equal, wide, before))


def test_other_blocks_do_not_leak(made: Made) -> None:
    """NaN and infinity in a tile reach the rows that select it, and no others."""
    tiles = video_tiles((5, 7, 9), (4, 4, 4), CPU)
    clean = tensors(1, tiles.tokens, 2, 2, made.head_size)
    selected = random_choice(1, 2, (tiles.num_blocks, tiles.num_blocks), 3)
    expected = attend(made.executor, clean, (tiles, tiles), selected)
    for poisoned in (0, 4, tiles.num_blocks - 1):
        inside = tiles.block_of == poisoned
        qkv = [clean[0], *(x.clone() for x in clean[1:])]
        qkv[1][:, inside], qkv[2][:, inside] = float("nan"), float("inf")
        output = attend(made.executor, qkv, (tiles, tiles), selected)
        listed = torch.arange(selected.indices.shape[-1]) < selected.counts[..., None]
        chosen = ((selected.indices == poisoned) & listed).any(-1).transpose(1, 2)[:, tiles.block_of]
        assert bool(chosen.any()) and not bool(chosen.all())
        assert torch.equal(output[~chosen], expected[~chosen])
        assert not bool(output[chosen].isfinite().any())


def test_no_gradients(made: Made) -> None:
    """What none flows through is nobody's silent half of a gradient."""
    tiles = video_tiles((4, 4, 9), (4, 4, 4), CPU)
    qkv = [x.requires_grad_() for x in tensors(1, tiles.tokens, 2, 2, made.head_size)]
    coarse = CoarseTerm(torch.randn(1, 2, tiles.num_blocks, made.head_size), qkv[0])
    selected = random_choice(1, 2, (tiles.num_blocks, tiles.num_blocks), 2)
    assert not made.executor.differentiable
    assert not attend(made.executor, qkv, (tiles, tiles), selected, coarse).requires_grad


def test_softmax_scale(made: Made) -> None:
    tiles = video_tiles((5, 7, 9), (4, 4, 4), CPU)
    qkv = tensors(1, tiles.tokens, 2, 2, made.head_size)
    selected = random_choice(1, 2, (tiles.num_blocks, tiles.num_blocks), 3)
    if isinstance(made.executor, FastVideoExecutor):
        with pytest.raises(MetadataError, match=r"A_BACKEND: softmax_scale 0\.3 .*0\.125"):
            attend(made.executor, qkv, (tiles, tiles), selected, scale=0.3)
        return
    output = attend(made.executor, qkv, (tiles, tiles), selected, scale=0.3)
    torch.testing.assert_close(
        output, attend(TorchExecutor(), qkv, (tiles, tiles), selected, scale=0.3), atol=1e-5, rtol=1e-4
    )


def test_page_sizes() -> None:
    assert page_size(video_tiles((21, 45, 80), (4, 8, 8), CPU)) == 8
    assert page_size(video_tiles((21, 45, 80), (4, 4, 4), CPU)) == 4
    assert page_size(video_tiles((21, 30, 52), (4, 8, 8), CPU)) == 16  # 24 tokens in the last tile
    assert page_size(video_tiles((4, 8, 8), (4, 8, 8), CPU)) == 16
    assert page_size(BlockPartition.in_order(1000, 128, CPU)) == 16  # 104 tokens in the last block
    assert page_size(video_tiles((3, 3, 3), (2, 2, 2), CPU)) == 2  # 1 token in the last tile
    assert page_size(video_tiles((6, 6, 6), (3, 3, 3), CPU)) == 1


@pytest.mark.parametrize(
    ("executor", "missing", "installs"),
    [
        (Fa3Executor, "flash_attn_interface", "flash-attention"),
        (Fa4Executor, "flash_attn.cute", "omni-attn[fa4]"),
        (FastVideoExecutor, "fastvideo_kernel", "omni-attn[fastvideo]"),
        (FlashInferExecutor, "flashinfer.cute_dsl.sparse.bsa_attn_sm100_blk64", "omni-attn[flashinfer]"),
    ],
)
def test_missing_package(executor: Callable[[str], Executor], missing: str, installs: str) -> None:
    error = ModuleNotFoundError(f"No module named {missing!r}", name=missing)
    with fake_package(missing, raises=error), pytest.raises(BackendImportError) as caught:
        executor("FASTVIDEO_VSA (a variant)")
    assert str(caught.value).startswith("FASTVIDEO_VSA (a variant): ") and installs in str(caught.value)


# --- flex_attention itself, traced on the CPU


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("eager")
    torch.compiler.reset()
    flex_kernels._compiled.cache_clear()
    monkeypatch.setattr(flex_kernels.torch, "compile", functools.partial(torch.compile, backend=counter))
    yield counter
    torch.compiler.reset()
    flex_kernels._compiled.cache_clear()


@pytest.mark.parametrize("tile", [(4, 4, 4), (4, 8, 8)])
def test_flex_compiles_once_for_all_choices(frames: CompileCounterWithBackend, tile: Extent) -> None:
    """Uncompiled, torch looks at the rule alone and not at the map, so that the numbers say nothing here."""
    tiles = video_tiles((5, 9, 9), tile, CPU)
    executor = FlexExecutor("A_BACKEND")
    for seed in range(3):
        qkv = tensors(1, tiles.tokens, 2, 1, 16, seed)
        selected = random_choice(1, 2, (tiles.num_blocks, tiles.num_blocks), 3, seed)
        assert attend(executor, qkv, (tiles, tiles), selected).shape == qkv[0].shape
    assert frames.frame_count == 1
