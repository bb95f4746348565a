"""VSA-H3 of random sequences against float64, and what it reduces to."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omni_attn import Attention, AttentionMetadata, PackedPadding, VideoLayout
from omni_attn.ops.reference import reference_attention
from tests.models.minimax_h3.attention.h3_layers import MODES, PUBLISHED, SMALL, h3_layer, random_call
from tests.ops.prefix_oracle import blocks_of, margin, vsa_h3_of
from tests.ops.vsa_oracle import Extent, broadcast, budget, coarse_of, scores_of

FLOAT64 = {"dtype": "float64"}
TILE = (2, 4, 4)
every_mode = pytest.mark.parametrize("mode", MODES)
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
segment_lists = st.lists(st.sampled_from([0, 0, 1, 5, 7, 8, 9, 16, 20, 33]), max_size=4).map(tuple)
extents = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))


def close(output: torch.Tensor, expected: torch.Tensor, error: float = 1e-10) -> None:
    torch.testing.assert_close(output.double(), expected, atol=error, rtol=error)


@settings(max_examples=60)
@given(st.data())
def test_any_sequence_budget_and_gate(data: st.DataObject) -> None:
    draw = data.draw
    segments, grid = draw(segment_lists), draw(extents)
    references: tuple[Extent, ...] = tuple(
        draw(st.lists(extents.filter(lambda x: prod(x) <= 24), max_size=2))
    )
    tile = draw(st.sampled_from([(4, 4, 4), (2, 2, 4), (2, 2, 2), (4, 8, 8), (1, 3, 5)]))
    batch, heads, kv_heads = draw(st.sampled_from([(1, 1, 1), (1, 4, 2), (2, 2, 1), (1, 2, 2)]))
    mode, padding = draw(st.sampled_from([*MODES])), draw(st.sampled_from([0, 0, 3, 30]))
    before = (*segments, *map(prod, references))
    used = sum(before) + prod(grid)
    blocks, prefix = blocks_of(before, grid, tile)
    video = len(blocks) - prefix
    assume(len(blocks) <= 36)
    if draw(st.booleans()):
        options: dict[str, Any] = {"topk": draw(st.integers(1, video + 2))}
        kept = min(options["topk"], video)
    else:
        options = {"sparsity": draw(st.sampled_from([0.0, 0.3, 0.5, 0.7, 0.9, 1.0]))}
        kept = budget(options["sparsity"], video)
    coarse_weight = draw(st.sampled_from(["gate", "one"]))
    call = random_call(
        used + padding, batch=batch, heads=heads, kv_heads=kv_heads, seed=draw(st.integers(0, 99))
    )
    gate = draw(st.sampled_from([call[3], None]))
    valid = [x[:, :used] for x in call]
    scores = scores_of(valid[0], valid[1], blocks, blocks, 8**-0.5)
    compete = mode == "compete"
    assume(kept == video or margin(scores, prefix, kept, compete=compete) > 1e-9)
    for x in call:
        x[:, used:] = float("nan")
    layout = VideoLayout(segments, (*references, grid), used)
    record = AttentionMetadata(video_layout=layout)
    if padding and batch == 1 and draw(st.booleans()):
        record = AttentionMetadata(video_layout=layout, packed_padding=PackedPadding(used, used))
    if gate is not None:
        record = record.with_layer_inputs(gate_compress=gate)
    needs = {**FLOAT64, "num_kv_heads": kv_heads}
    layer = h3_layer(
        impl=MODES[mode], heads=heads, tile_size=tile, coarse_weight=coarse_weight, needs=needs, **options
    )
    before_call = [x.clone() for x in call]
    output = layer(*call[:3], record)
    expected = vsa_h3_of(
        *valid[:3],
        before,
        grid,
        tile,
        kept,
        8**-0.5,
        gate=None if gate is None else gate[:, :used],
        coarse=coarse_weight == "one",
        compete=compete,
    )
    close(output[:, :used], expected)
    assert output.is_contiguous() and output.dtype == torch.float64 and not output[:, used:].any()
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(call, before_call, strict=True))
    route = "VSA" if kept < video else "VSA_ALL_BLOCKS"
    assert layer.route == f"FASTVIDEO_VSA (torch): {route}"


def small_layer(mode: str = "exempt", **options: Any) -> Attention:
    return h3_layer(impl=MODES[mode], tile_size=TILE, needs=FLOAT64, **options)


def coarse_term(call: Call, gate: torch.Tensor) -> torch.Tensor:
    blocks, _ = blocks_of(SMALL.segments, SMALL.grid, TILE)
    scores = scores_of(call[0], call[1], blocks, blocks, 8**-0.5)
    return broadcast(coarse_of(scores, call[2], blocks), blocks, gate)


@every_mode
def test_segments_see_everything(mode: str) -> None:
    """Their rows are dense attention in both modes; the gate's term comes on top."""
    call = random_call(SMALL.tokens)
    dense = reference_attention(*call[:3])[0]
    layer = small_layer(mode, topk=1)
    output = layer(*call[:3], SMALL.record())
    how = {"exempt": "beside", "compete": "competing with"}[mode]
    assert layer.route_reason == f"1 of 8 tiles, {how} 39 tokens before them"
    close(output[:, : SMALL.before], dense[:, : SMALL.before])
    assert (output[:, SMALL.before :] - dense[:, SMALL.before :]).abs().max() > 0.05
    gated = layer(*call[:3], SMALL.record(call[3]))
    close(gated - output, coarse_term(call, call[3]))


def test_segments_are_seen_by_everything_unless_they_compete() -> None:
    """A key before the video that no video row would rank: its value reaches all rows, or those before the video."""
    query, key, value, _ = random_call(SMALL.tokens)
    query = query.abs()
    key[:, :6] = -key[:, :6].abs() - 1
    louder = value.clone()
    louder[:, 2] += 100
    reached = {}
    for mode in MODES:
        layer = small_layer(mode, topk=1)
        change = layer(query, key, louder, SMALL.record()) - layer(query, key, value, SMALL.record())
        reached[mode] = change.abs().amax((0, 2, 3)) > 0
    assert reached["exempt"].all()
    assert reached["compete"][: SMALL.before].all() and not reached["compete"][SMALL.before :].any()


@every_mode
@pytest.mark.parametrize("options", [{"topk": 8}, {"topk": 99}, {"sparsity": 0.0}], ids=str)
def test_all_tiles_are_dense_attention_with_the_gates_term(mode: str, options: dict[str, Any]) -> None:
    """No switch of the checkpoint's kind: whoever has a gate was trained with it."""
    call = random_call(SMALL.tokens)
    query, key, value, gate = call
    dense = reference_attention(query, key, value)[0]
    layer = small_layer(mode, **options)
    close(layer(query, key, value, SMALL.record()), dense)
    assert layer.route.endswith("VSA_ALL_BLOCKS") and "all 8 tiles" in str(layer.route_reason)
    close(layer(query, key, value, SMALL.record(torch.zeros_like(gate))), dense)
    for preserve in (False, True):
        record = SMALL.record(gate, preserve_vsa_all_blocks=preserve)
        close(layer(query, key, value, record), dense + coarse_term(call, gate))


@pytest.mark.parametrize("topk", [2, 99], ids=["sparse", "dense"])
def test_a_gate_may_be_longer_than_the_query(topk: int) -> None:
    query, key, value, gate = random_call(SMALL.tokens)
    longer = torch.cat([gate, torch.full_like(gate[:, :23], float("nan"))], dim=1)
    layer = small_layer(topk=topk)
    expected = layer(query, key, value, SMALL.record(gate))
    record = SMALL.record(longer)
    assert torch.equal(layer(query, key, value, record), expected)
    made = record.prepared(layer.group_id)
    assert made is not None and layer.impl is not None
    selection = layer.impl.select_blocks(query, key, value, made.product, gate_compress=longer)
    if topk == 2:
        assert selection is not None and selection.coarse is not None
        assert torch.equal(selection.coarse.gate, gate)  # type: ignore[arg-type]
    else:
        assert selection is None


@pytest.mark.parametrize("topk", [2, 99], ids=["sparse", "dense"])
@pytest.mark.parametrize("packed", [False, True])
def test_padding_reaches_nobody(topk: int, packed: bool) -> None:
    """The layout ends before the call does, as native packing leaves it; whether the record says so twice or not."""
    used, rows = SMALL.tokens, 192
    call = random_call(rows)
    layer = small_layer(topk=topk)
    expected = layer(*(x[:, :used] for x in call[:3]), SMALL.record(call[3][:, :used]))
    for x in call:
        x[:, used:] = float("nan")
    padding = {"packed_padding": PackedPadding(used, used)} if packed else {}
    output = layer(*call[:3], SMALL.record(call[3], **padding))
    close(output[:, :used], expected)
    assert output.shape[1] == rows and not output[:, used:].any()


@every_mode
def test_a_video_alone_is_plain_video_sparse_attention(mode: str) -> None:
    call = random_call(90)
    plain = h3_layer(impl=None, tile_size=TILE, topk=2, needs=FLOAT64)
    expected = plain(
        *call[:3], AttentionMetadata(vsa_dit_seq_shape=(3, 5, 6)).with_layer_inputs(gate_compress=call[3])
    )
    layout = VideoLayout((0, 0), ((3, 5, 6),), 90)
    record = AttentionMetadata(video_layout=layout).with_layer_inputs(gate_compress=call[3])
    assert torch.equal(small_layer(mode, topk=2)(*call[:3], record), expected)


def test_what_a_reference_is() -> None:
    """Videos before the target are segments: chunks of their rows in order, dense both ways."""
    call = random_call(6 + 40 + 90)
    with_reference = VideoLayout((6,), ((2, 4, 5), (3, 5, 6)), 136)
    as_segment = VideoLayout((6, 40), ((3, 5, 6),), 136)
    layer = small_layer(topk=2)
    first, second = (
        layer(*call[:3], AttentionMetadata(video_layout=layout)) for layout in (with_reference, as_segment)
    )
    assert torch.equal(first, second)


@every_mode
def test_items_and_heads_select_for_themselves(mode: str) -> None:
    call = random_call(SMALL.tokens, batch=2, heads=4, kv_heads=2)
    layer = h3_layer(impl=MODES[mode], heads=4, topk=2, tile_size=TILE, needs={**FLOAT64, "num_kv_heads": 2})
    together = layer(*call[:3], SMALL.record(call[3]))
    for item in range(2):
        one = [x[item : item + 1] for x in call]
        close(layer(*one[:3], SMALL.record(one[3])), together[item : item + 1])
    flipped = [x.flip(2) for x in call]
    close(layer(*flipped[:3], SMALL.record(flipped[3])), together.flip(2))


def test_views_are_read_and_left_alone() -> None:
    call = random_call(SMALL.tokens)
    layer = small_layer(topk=2)
    expected = layer(*call[:3], SMALL.record(call[3]))
    fused = torch.stack(call, dim=2)
    before = fused.clone()
    for views in (
        fused.unbind(2),
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in call],
        [torch.stack([x, x * float("nan")], -1)[..., 0] for x in call],
    ):
        output = layer(*views[:3], SMALL.record(views[3]))
        assert output.is_contiguous()
        close(output, expected)
    assert torch.equal(fused, before)


def test_the_last_span_alone_is_cut_in_three_dimensions() -> None:
    layer = small_layer(topk=1)
    product = layer.prepare(PUBLISHED.record(), (PUBLISHED.tokens,) * 2).product
    assert product.grid == (5, 6, 7) and product.segments == (70, 5, 13)
