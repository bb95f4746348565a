"""Sparse attention under Ulysses: each head keeps the blocks that it keeps alone; routes and reports are as alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_attn import Attention, AttentionMetadata, VideoLayout, prepare_attention, use_attention_config
from omni_attn.backends.fastvideo_vsa import FastVideoVSAImpl
from omni_attn.config import load_config
from omni_attn.errors import MetadataError
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import MiniMaxH3VSAImpl
from omni_attn.ops.block_sparse.selection import BlockSelection, block_map
from omni_attn.parallel import Parallel, use_parallel
from omni_attn.parallel.runner import ParallelImpl
from omni_attn.report import attention_report
from omni_attn.testing import fake_ranks
from tests.backends import block_summary_layers, rainfusion_layers
from tests.layer.stands import STANDS, Stand
from tests.parallel.counted import counted

GRID, TILE = (3, 5, 7), (2, 2, 4)
LAYOUT = VideoLayout((9, 4), (GRID,), 13 + math.prod(GRID))
VSA_STANDS = [stand for stand in STANDS if stand.name == "FASTVIDEO_VSA"]
HEADS, KV_HEADS, SIZE = 6, 2, 128
#: Even heads, uneven ones, and a rank that has none.
RANKS = [2, 4, 7]

Build = Callable[[], Attention]


def vsa(spec: dict[str, Any] | None = None, *, platform: Any = None, **needs: Any) -> Attention:
    whole = {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": {"topk": 3, "tile_size": TILE}} | (spec or {})
    where: dict[str, Any] = {"device": "cpu"} if platform is None else {"platform": platform}
    with use_attention_config(load_config({"default": whole}), **where):
        return Attention(HEADS, SIZE, role="self", video_grid=True, num_kv_heads=KV_HEADS, **needs)


def vsa_h3(spec: dict[str, Any] | None = None, **needs: Any) -> Attention:
    return vsa(spec, impl_overrides={"FASTVIDEO_VSA": MiniMaxH3VSAImpl}, **needs)


def call_of(
    tokens: int, dtype: torch.dtype = torch.float32, *, heads: tuple[int, int] = (HEADS, KV_HEADS)
) -> list[Tensor]:
    """Query, key, value and gate."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(2, tokens, count, SIZE, generator=generator).to(dtype) for count in counts]


def rows_of(layer: Attention) -> list[tuple[object, ...]]:
    """What a report tells of how a layer ran."""
    names = ("backend", "variant", "impl", "source", "reason", "route", "fallbacks_taken", "routes_taken")
    return [tuple(getattr(row, name) for name in names) for row in attention_report(layer)]


def run(
    layer: Attention, call: list[Tensor], record: AttentionMetadata, whole: int, *, gated: bool
) -> tuple[Tensor, list[BlockSelection | None]]:
    """The output, and which blocks each call of the local impl kept."""
    impl, kept = layer.impl, []
    assert impl is not None
    forward = impl.forward

    def looked_at(*arguments: Any, **inputs: Tensor) -> Tensor:
        kept.append(impl.select_blocks(*arguments, **inputs))
        return forward(*arguments, **inputs)

    impl.forward = looked_at  # type: ignore[method-assign]
    prepare_attention(layer, {"self": record}, {"self": (whole, whole)})
    if gated:
        record = record.with_layer_inputs(gate_compress=call[3])
    return layer(*call[:3], record), kept


def check(
    build: Build,
    ranks: int,
    call: list[Tensor],
    record: Callable[[], AttentionMetadata],
    *,
    gated: bool = False,
    route: str,
) -> None:
    """The same numbers, blocks and reports on so many ranks as on one."""
    tokens, one = call[0].shape[1], build()
    alone, [expected] = run(one, call, record(), tokens, gated=gated)
    assert one.route.endswith(f": {route}"), one.route

    def work(parallel: Parallel) -> tuple[Tensor, list[BlockSelection | None], list[Any]]:
        layer = build()
        output, kept = run(layer, [parallel.split(x) for x in call], record(), tokens, gated=gated)
        return output, kept, rows_of(layer)

    found = fake_ranks({"ulysses_degree": ranks}, work)
    torch.testing.assert_close(torch.cat([output for output, *_ in found], 1), alone, atol=1e-6, rtol=0)
    assert all(rows == rows_of(one) for *_, rows in found)
    maps = [kept for _, calls, _ in found for kept in calls]
    assert len(maps) == min(ranks, call[0].shape[2])
    if expected is None:
        assert maps == [None] * len(maps)
        return
    blocks = expected.key_blocks.num_blocks
    together = torch.cat([block_map(kept.selected, blocks) for kept in maps if kept is not None], 1)
    assert torch.equal(together, block_map(expected.selected, blocks))
    assert not together.all()


@pytest.mark.parametrize("stand", VSA_STANDS, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["no gate", "gate"])
@pytest.mark.parametrize("ranks", RANKS)
def test_video_sparse_attention_on_every_executor(stand: Stand, gated: bool, ranks: int) -> None:
    def build() -> Attention:
        return vsa({"variant": stand.variant}, platform=stand.platform)

    with stand.kernels(publishes_grid=False):
        check(
            build,
            ranks,
            call_of(math.prod(GRID), stand.dtype),
            lambda: AttentionMetadata(vsa_dit_seq_shape=GRID),
            gated=gated,
            route="VSA",
        )


@pytest.mark.parametrize("options", [{"topk": 3}, {"sparsity": 0.5}, {"topk": 3, "coarse_weight": "one"}])
@pytest.mark.parametrize("ranks", RANKS)
def test_the_override_of_minimax_h3(options: dict[str, Any], ranks: int) -> None:
    check(
        lambda: vsa_h3({"fastvideo_vsa": {"tile_size": TILE} | options}),
        ranks,
        call_of(LAYOUT.used_len),
        lambda: AttentionMetadata(video_layout=LAYOUT),
        gated=True,
        route="VSA",
    )


@pytest.mark.parametrize(
    ("build", "record", "route"),
    [
        (
            lambda: vsa({"fastvideo_vsa": {"topk": 99}}),
            lambda: AttentionMetadata(vsa_dit_seq_shape=GRID),
            "SDPA",
        ),
        (
            lambda: vsa({"fastvideo_vsa": {"topk": 99, "tile_size": TILE}}),
            lambda: AttentionMetadata(vsa_dit_seq_shape=GRID, preserve_vsa_all_blocks=True),
            "VSA_ALL_BLOCKS",
        ),
        (
            lambda: vsa_h3({"fastvideo_vsa": {"sparsity": 0.0}}),
            lambda: AttentionMetadata(video_layout=VideoLayout((), (GRID,), math.prod(GRID))),
            "VSA_ALL_BLOCKS",
        ),
    ],
    ids=["dense", "kept on the sparse path", "MiniMax-H3"],
)
@pytest.mark.parametrize("ranks", RANKS)
def test_routes_of_all_blocks(
    build: Build, record: Callable[[], AttentionMetadata], route: str, ranks: int
) -> None:
    """Every head keeps all blocks, so the maps need not differ; numbers and reports are compared."""
    call, tokens = call_of(math.prod(GRID)), math.prod(GRID)
    one = build()
    alone, _ = run(one, call, record(), tokens, gated=True)
    assert one.route.endswith(f": {route}")

    def work(parallel: Parallel) -> tuple[Tensor, list[Any]]:
        layer = build()
        output, _ = run(layer, [parallel.split(x) for x in call], record(), tokens, gated=True)
        return output, rows_of(layer)

    found = fake_ranks({"ulysses_degree": ranks}, work)
    torch.testing.assert_close(torch.cat([output for output, _ in found], 1), alone, atol=1e-6, rtol=0)
    assert all(rows == rows_of(one) for _, rows in found)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_fallback_is_taken_on_every_rank(ranks: int) -> None:
    """Also where a rank has no head; the gate, which the fallback does not read, stays at home everywhere."""
    spec = {"fallback": ["TORCH_SDPA"]}
    call, one = call_of(20), vsa(spec)
    record = AttentionMetadata().with_layer_inputs(gate_compress=call[3])  # of no known grid
    alone = one(*call[:3], record)
    assert one.fallbacks_taken == 1

    def work(parallel: Parallel) -> tuple[Tensor, list[Any]]:
        layer, mine = vsa(spec), [parallel.split(x) for x in call]
        stated = AttentionMetadata()
        prepare_attention(layer, {"self": stated}, {"self": (20, 20)})
        output = layer(*mine[:3], stated.with_layer_inputs(gate_compress=mine[3]))
        return output, rows_of(layer)

    found = fake_ranks({"ulysses_degree": ranks}, work)
    torch.testing.assert_close(torch.cat([output for output, _ in found], 1), alone, atol=1e-6, rtol=0)
    assert all(rows == rows_of(one) for _, rows in found)


def test_a_step_that_no_rank_can_express_is_refused_by_all() -> None:
    refused: list[int] = []

    def work(parallel: Parallel) -> None:
        watched, sent = counted(parallel)
        with use_parallel(watched):
            layer = vsa()
        with pytest.raises(MetadataError, match="vsa_dit_seq_shape"):
            prepare_attention(layer, {"self": AttentionMetadata()}, {"self": (20, 20)})
        assert not sent
        refused.append(parallel.rank)

    fake_ranks({"ulysses_degree": 7}, work)
    assert sorted(refused) == list(range(7))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("step", [0, 1, 2, 4])
def test_rainfusion_and_its_schedule(ranks: int, step: int) -> None:
    """Two dense steps, two sparse ones, a dense one."""

    def build() -> Attention:
        options = {"sparsity": 0.7, "start_step": 2, "end_step": 1}
        return rainfusion_layers.layer(heads=HEADS, size=SIZE, **options)

    layout = rainfusion_layers.JOINT
    with rainfusion_layers.blocks_of(16):
        check(
            build,
            ranks,
            call_of(layout.used_len, heads=(HEADS, HEADS)),
            lambda: AttentionMetadata(video_layout=layout).at_step(step, num_steps=5),
            route="RAINFUSION" if step == 2 else "SDPA",
        )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("prefix", ["blocks.0.attn", "blocks.1.attn"])
def test_block_summaries_and_skipped_layers(ranks: int, prefix: str) -> None:
    def build() -> Attention:
        options = {"sparsity": 0.5, "skip_layers": [1]}
        return block_summary_layers.layer(prefix=prefix, heads=HEADS, size=SIZE, **options)

    layout = block_summary_layers.JOINT
    with block_summary_layers.blocks_of(8):
        check(
            build,
            ranks,
            call_of(layout.used_len, heads=(HEADS, HEADS)),
            lambda: AttentionMetadata(video_layout=layout),
            route="BLOCK_SUMMARY" if prefix == "blocks.0.attn" else "SDPA",
        )


def test_an_override_changes_nothing_in_the_dispatch() -> None:
    """Same strategy, same exchanges of the same sizes; what runs between them is the model's own class."""
    call, whole = call_of(LAYOUT.used_len), LAYOUT.used_len
    grid = (1, 1, whole)

    def work(parallel: Parallel) -> None:
        told: list[tuple[object, ...]] = []
        for build, stated, impl_cls in (
            (vsa, {"vsa_dit_seq_shape": grid}, FastVideoVSAImpl),
            (vsa_h3, {"video_layout": LAYOUT}, MiniMaxH3VSAImpl),
        ):
            watched, sent = counted(parallel)
            with use_parallel(watched):
                layer = build()
            assert type(layer.impl) is impl_cls
            [route] = layer._routes
            assert isinstance(route.called, ParallelImpl) and route.called.impls == {"own": layer.impl}
            record, mine = AttentionMetadata(**stated), [watched.split(x) for x in call]
            run(layer, mine, record, whole, gated=True)
            strategy = route.called.strategy
            told.append((type(strategy), strategy.key, strategy.describe(), layer.request, tuple(sent)))
        assert told[0] == told[1] and len(told[0][-1]) == 2

    fake_ranks({"ulysses_degree": 4}, work)


@pytest.mark.parametrize("build", [vsa, vsa_h3], ids=["FASTVIDEO_VSA", "MiniMax-H3"])
@pytest.mark.parametrize("fault", ["dtype", "tokens", "heads"])
def test_a_gate_that_cannot_travel_is_refused_before_any_exchange(build: Build, fault: str) -> None:
    """Alone, MiniMax-H3 cuts a gate of more tokens; on a rank those behind its own would be others' tokens."""
    tokens = math.prod(GRID)
    call = call_of(tokens)

    def work(parallel: Parallel) -> bool:
        watched, sent = counted(parallel)
        with use_parallel(watched):
            layer = build()
        *mine, gate = (parallel.split(x) for x in call)
        gate = {"dtype": gate.double(), "tokens": torch.cat([gate, gate], 1), "heads": gate[:, :, :1]}[fault]
        record = AttentionMetadata(
            vsa_dit_seq_shape=GRID, video_layout=VideoLayout((), (GRID,), tokens)
        ).with_layer_inputs(gate_compress=gate)
        if build is vsa:
            record = AttentionMetadata(vsa_dit_seq_shape=GRID).with_layer_inputs(gate_compress=gate)
        prepare_attention(layer, {"self": record}, {"self": (tokens, tokens)})
        with pytest.raises(MetadataError, match=r"gate_compress is .* travels between ranks"):
            layer(*mine, record)
        return not sent

    assert all(fake_ranks({"ulysses_degree": 2}, work))


@pytest.mark.parametrize("gated", [False, True], ids=["no gate", "gate"])
def test_gradients_of_video_sparse_attention(gated: bool) -> None:
    tokens = math.prod(GRID)
    call = [x.requires_grad_() for x in call_of(tokens)]
    weight = torch.randn(2, tokens, HEADS, SIZE, generator=torch.Generator().manual_seed(5))

    def gradients(output: Tensor) -> list[Tensor]:
        wanted = call if gated else call[:3]
        return list(torch.autograd.grad((output * weight).sum(), wanted))

    def record_with(gate: Tensor) -> AttentionMetadata:
        record = AttentionMetadata(vsa_dit_seq_shape=GRID)
        return record.with_layer_inputs(gate_compress=gate) if gated else record

    alone = gradients(vsa(requires_grad=True)(*call[:3], record_with(call[3])))

    def work(parallel: Parallel) -> Tensor:
        layer, (*mine, gate) = vsa(requires_grad=True), (parallel.split(x) for x in call)
        record = AttentionMetadata(vsa_dit_seq_shape=GRID)
        prepare_attention(layer, {"self": record}, {"self": (tokens, tokens)})
        return layer(*mine, record.with_layer_inputs(gate_compress=gate) if gated else record)

    together = gradients(torch.cat(fake_ranks({"ulysses_degree": 3}, work), 1))
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
