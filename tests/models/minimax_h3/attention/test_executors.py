"""MiniMax-H3's layers on every executor of FASTVIDEO_VSA: numbers, padding, one operator in compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from omni_attn import AttentionMetadata, PackedPadding, VideoLayout, prepare_attention
from omni_attn.ops.block_sparse.selection import block_map
from tests.inspection.stubs import EXECUTOR
from tests.layer.stands import Stand, assert_close
from tests.models.minimax_h3.attention.h3_layers import (
    MODES,
    SMALL,
    VSA_STANDS,
    Sequence3D,
    h3_layer,
    random_call,
    stand_layer,
)
from tests.ops.prefix_oracle import vsa_h3_of

every_executor = pytest.mark.parametrize("stand", VSA_STANDS, ids=str)
TOLERANCE = {torch.float32: 2e-5}
TILE = (2, 4, 4)
ROUTES = pytest.mark.parametrize("topk", [2, 99], ids=["sparse", "dense"])


def call_of(stand: Stand, tokens: int) -> list[torch.Tensor]:
    """Query, key, value and gate of a layer of stand_layer."""
    return list(random_call(tokens, heads=4, kv_heads=2, size=128, dtype=stand.dtype))


@every_executor
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("sequence", "tile", "topk"),
    [
        (SMALL, TILE, 2),
        (Sequence3D((7, 65), (2, 9, 10)), (4, 8, 8), 1),
        (Sequence3D((1,), (5, 4, 9)), (4, 4, 4), 2),
    ],
)
def test_every_executor_equals_float64(
    stand: Stand, mode: str, sequence: Sequence3D, tile: tuple[int, int, int], topk: int
) -> None:
    query, key, value, gate = call_of(stand, sequence.tokens)
    with stand.kernels(publishes_grid=False) as log:
        layer = stand_layer(stand, impl=MODES[mode], topk=topk, tile_size=list(tile))
        output = layer(query, key, value, sequence.record(gate))
    assert len(log) == 1 and layer.route == f"FASTVIDEO_VSA ({stand.variant}): VSA"
    assert output.is_contiguous() and output.dtype == stand.dtype
    wide = (x.double() for x in (query, key, value))
    numbers = (sequence.segments, sequence.grid, tile, topk, 128**-0.5)
    expected = vsa_h3_of(*wide, *numbers, gate=gate, compete=mode == "compete")
    assert_close(output, expected, TOLERANCE.get(stand.dtype, 3e-2))


@every_executor
@ROUTES
def test_padding_reaches_nobody(stand: Stand, topk: int) -> None:
    used, call = SMALL.tokens, call_of(stand, SMALL.tokens + 63)
    for x in call:
        x[:, used:] = float("nan")
    with stand.kernels(publishes_grid=False):
        layer = stand_layer(stand, topk=topk, tile_size=TILE)
        expected = layer(*(x[:, :used] for x in call[:3]), SMALL.record(call[3][:, :used]))
        padded = SMALL.record(call[3], packed_padding=PackedPadding(used, used))
        output = layer(*call[:3], padded)
    assert_close(output[:, :used], expected.double(), 2e-2 if stand.dtype != torch.float32 else 1e-5)
    assert output.isfinite().all() and not output[:, used:].any()


@every_executor
@pytest.mark.parametrize("mode", MODES)
def test_what_it_says_it_selects_is_what_it_computes(stand: Stand, mode: str) -> None:
    query, key, value, gate = call_of(stand, SMALL.tokens + 63)
    used = SMALL.tokens
    record = SMALL.record(gate)
    with stand.kernels(publishes_grid=False):
        layer = stand_layer(stand, impl=MODES[mode], topk=2, tile_size=TILE)
        output = layer(query, key, value, record)
        made = record.prepared(layer.group_id)
        assert made is not None and layer.impl is not None
        selection = layer.impl.select_blocks(query, key, value, made.product, gate_compress=gate)
    assert selection is not None and selection.query_blocks is selection.key_blocks
    assert selection.query_blocks.tokens == used
    assert (selection.selected.counts[:, :, :3] == 11).all() and (
        selection.selected.counts[:, :, 3:] == 5
    ).all()
    wide = [x[:, :used].double() for x in (query, key, value)]
    packed = EXECUTOR.pack(*wide, selection.query_blocks, selection.key_blocks)
    executed = EXECUTOR.attend(packed, selection.selected, 128**-0.5, selection.coarse)
    assert_close(output[:, :used], executed, TOLERANCE.get(stand.dtype, 3e-2))


class Block(nn.Module):
    """A block with one main attention layer, whose gate comes from what its query comes from."""

    def __init__(self, stand: Stand, topk: int) -> None:
        super().__init__()
        self.attn = stand_layer(stand, topk=topk, tile_size=TILE)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, record: AttentionMetadata
    ) -> torch.Tensor:
        gated = record.with_layer_inputs(gate_compress=query * 0.5)
        output: torch.Tensor = self.attn(query, key, value, gated) + query
        return output


@every_executor
@ROUTES
def test_equal_blocks_compile_one_frame(stand: Stand, topk: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = call_of(stand, SMALL.tokens)[:3]
    with stand.kernels(publishes_grid=False), torch.no_grad():
        model = nn.ModuleList(Block(stand, topk) for _ in range(10))
        blocks = [torch.compile(block, fullgraph=True, backend=counter) for block in model]
        for step in range(2):
            record = SMALL.record().at_step(step, num_steps=2)
            prepare_attention(model, {"self": record}, {"self": (SMALL.tokens,) * 2})
            expected = model[0](*call, record)
            assert all(torch.equal(block(*call, record), expected) for block in blocks)
    assert counter.frame_count == 1
    names = [str(node.target) for node in counter.graphs[0].graph.nodes if "omni_attn" in str(node.target)]
    assert len(names) == 1
    torch._dynamo.reset()


def test_prompts_of_other_lengths_compile_at_most_once_more() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = h3_layer(topk=2, tile_size=TILE, needs={"dtype": "float64"})
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    with torch.no_grad():
        for text in (30, 35, 47, 64):
            sequence = Sequence3D((text, 9), (3, 5, 6))
            call, record = random_call(sequence.tokens), sequence.record()
            prepare_attention(layer, {"self": record}, {"self": (sequence.tokens,) * 2})
            gated = record.with_layer_inputs(gate_compress=call[3])
            assert torch.equal(compiled(*call[:3], gated), layer(*call[:3], gated))
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@ROUTES
def test_a_call_of_fakes_leaves_nothing_behind(topk: int) -> None:
    """Nor does it need numbers; a real call afterwards computes."""
    sequence = Sequence3D((topk, 3), (3, 5, 7))  # of no other test
    layer = h3_layer(topk=topk, tile_size=TILE, needs={"dtype": "float64"})
    call = random_call(sequence.tokens + 2)
    with FakeTensorMode() as fakes:
        query, key, value, gate = map(fakes.from_tensor, call)
        assert layer(query, key, value, sequence.record(gate)).shape == query.shape
    output = layer(*call[:3], sequence.record(call[3]))
    expected = vsa_h3_of(
        *(x[:, : sequence.tokens] for x in call[:3]),
        *(sequence.segments, sequence.grid, TILE, topk, 8**-0.5),
        gate=call[3],
    )
    assert_close(output[:, : sequence.tokens], expected, 1e-9)


def differentiable_h3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    chosen: torch.Tensor,
    rows: Any,
) -> torch.Tensor:
    """Dense attention with a mask of blocks, and the gate's term, from membership matrices [blocks, S]."""
    means = [torch.einsum("ns,bshd->bhnd", rows / rows.sum(-1, keepdim=True), x) for x in (query, key, value)]
    scores = means[0] @ means[1].mT * 8**-0.5
    coarse = torch.einsum("bhnd,ns->bshd", scores.softmax(-1) @ means[2], rows)
    seen = (rows.T @ chosen.double() @ rows) > 0
    fine = (torch.einsum("bqhd,bkhd->bhqk", query, key) * 8**-0.5).masked_fill(~seen, -1e30).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", fine, value) + gate * coarse


@ROUTES
@pytest.mark.parametrize("mode", MODES)
def test_gradients_reach_query_key_value_and_gate(mode: str, topk: int) -> None:
    call = [x.requires_grad_() for x in random_call(SMALL.tokens)]
    layer = h3_layer(
        impl=MODES[mode], topk=topk, tile_size=TILE, needs={"dtype": "float64", "requires_grad": True}
    )
    record = SMALL.record(call[3])
    output = layer(*call[:3], record)
    sparse = h3_layer(impl=MODES[mode], topk=2, tile_size=TILE, needs={"dtype": "float64"})
    product = sparse.prepare(SMALL.record(), (SMALL.tokens,) * 2).product
    assert sparse.impl is not None
    selection = sparse.impl.select_blocks(*(x.detach() for x in call[:3]), product)
    assert selection is not None
    blocks = selection.query_blocks
    rows = torch.zeros(blocks.num_blocks, blocks.tokens, dtype=torch.float64)
    rows[blocks.block_of, torch.arange(blocks.tokens)] = 1
    chosen = torch.ones(1, 2, blocks.num_blocks, blocks.num_blocks)
    if topk == 2:
        chosen = block_map(selection.selected, blocks.num_blocks)
    expected = differentiable_h3(call[0], call[1], call[2], call[3], chosen, rows)
    assert_close(output.detach(), expected.detach(), 1e-9)
    direction = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, wanted = (torch.autograd.grad((x * direction).sum(), call) for x in (output, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        assert theirs.abs().max() > 0.01
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


@pytest.mark.parametrize("variant", ["fa3", "fa4", "fastvideo", "flashinfer", "flex"])
def test_an_executor_without_gradients_says_so(variant: str) -> None:
    stand = next(s for s in VSA_STANDS if s.variant == variant)
    call = call_of(stand, SMALL.tokens)
    gate = call[3].requires_grad_()
    with stand.kernels(publishes_grid=False):
        output = stand_layer(stand, topk=2, tile_size=TILE)(*call[:3], SMALL.record(gate))
        with pytest.raises(RuntimeError, match="backward"):
            output.sum().backward()


def test_a_dense_route_has_gradients_on_every_executor() -> None:
    """No executor runs there."""
    for stand in VSA_STANDS:
        call = [x.requires_grad_() for x in call_of(stand, SMALL.tokens)]
        with stand.kernels(publishes_grid=False) as log:
            output = stand_layer(stand, topk=99, tile_size=TILE)(*call[:3], SMALL.record(call[3]))
            output.float().square().sum().backward()
        assert not log.calls and all(x.grad is not None and x.grad.isfinite().all() for x in call)


def test_nothing_to_attend_to_needs_no_layout() -> None:
    empty = torch.empty(1, 0, 2, 8)
    assert h3_layer()(empty, empty, empty, AttentionMetadata()).shape == (1, 0, 2, 8)


def test_a_segment_may_be_all_of_the_prefix_or_none() -> None:
    for segments in ((), (0,), (200,), (1, 1, 1)):
        layout = VideoLayout(segments, ((2, 4, 8),), sum(segments) + 64)
        call = random_call(layout.used_len)
        output = h3_layer(topk=1, tile_size=(2, 2, 4), needs={"dtype": "float64"})(
            *call[:3], AttentionMetadata(video_layout=layout).with_layer_inputs(gate_compress=call[3])
        )
        numbers = (segments, (2, 4, 8), (2, 2, 4), 1, 8**-0.5)
        assert_close(output, vsa_h3_of(*call[:3], *numbers, gate=call[3]), 1e-9)
