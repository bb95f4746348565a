"""FASTVIDEO_VSA: the specification's numbers, every executor against a masked reference, routes, gates, refusals."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from omni_attn import (
    Attention,
    AttentionConfig,
    AttentionMetadata,
    PackedPadding,
    prepare_attention,
    use_attention_config,
)
from omni_attn.backends.fastvideo_vsa_facts import EXECUTOR_ORDERS, VSA_VARIANTS
from omni_attn.backends.sparse_executors import EXECUTORS
from omni_attn.config import load_config
from omni_attn.errors import MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.ops.video_tiles import Extent, partition, tile_sizes
from omni_attn.platforms import current_omni_platform
from omni_attn.report import attention_report
from omni_attn.testing import fake_device
from tests.layer.stands import STANDS, Stand, assert_close, refusal_of

GRID, TILE, TOKENS = (5, 6, 7), (4, 4, 4), 210
VSA_STANDS = [stand for stand in STANDS if stand.name == "FASTVIDEO_VSA"]
every_executor = pytest.mark.parametrize("stand", VSA_STANDS, ids=str)
CPU = fake_device("cpu")


def build(
    platform: Any = CPU, *, variant: str | None = None, heads: int = 2, size: int = 8, **needs: Any
) -> Attention:
    options = {
        name: needs.pop(name) for name in ("topk", "sparsity", "tile_size", "coarse_weight") if name in needs
    }
    spec = {"backend": "VSA", "variant": variant, "fastvideo_vsa": options}
    with use_attention_config(load_config({"default": spec}), platform=platform):
        return Attention(heads, size, role="self", **{"video_grid": True, **needs})


def record_for(grid: Extent = GRID, **fields: Any) -> AttentionMetadata:
    return AttentionMetadata(vsa_dit_seq_shape=grid, **fields)


def spec_call() -> tuple[torch.Tensor, ...]:
    """Query, key, value and gate [1, 210, 2, 8] of the specification's test vectors, in float64."""
    s, n, d = torch.meshgrid(
        *(torch.arange(count, dtype=torch.float64) for count in (TOKENS, 2, 8)), indexing="ij"
    )
    query = 2 * torch.sin(0.37 * s + 0.5 * n + 0.9 * d)
    key = 2 * torch.sin(0.23 * s + 0.7 * n + 0.6 * d + 0.3)
    value = torch.sin(0.11 * s + 0.2 * n + 0.4 * d + 0.7)
    return query[None], key[None], value[None], torch.sin(0.05 * s + 0.3 * n + 0.2 * d + 0.1)[None]


#: topk, with a gate, kept on the sparse path: route, first four numbers, sum, sum of squares.
VECTORS: list[tuple[int, bool, bool, str, list[float], float, float]] = [
    (2, True, False, "VSA", [-0.363994, -0.724344, -0.989182, -1.106018], -748.637754475, 976.905737875),
    (2, False, False, "VSA", [-0.358771, -0.690579, -0.913360, -0.991942], -731.780623743, 920.138688954),
    (
        8,
        True,
        True,
        "VSA_ALL_BLOCKS",
        [0.045565, -0.002181, -0.068428, -0.132040],
        -155.511568752,
        38.156198856,
    ),
    (8, True, False, "SDPA", [0.050789, 0.031585, 0.007394, -0.017964], -138.654438020, 10.345301071),
]


@pytest.mark.parametrize(("topk", "gated", "keeps", "route", "first", "total", "squares"), VECTORS)
def test_the_vectors_of_the_specification(
    topk: int, gated: bool, keeps: bool, route: str, first: list[float], total: float, squares: float
) -> None:
    *call, gate = spec_call()
    layer, record = build(topk=topk, dtype="float64"), record_for(preserve_vsa_all_blocks=keeps)
    if gated:
        record = record.with_layer_inputs(gate_compress=gate)
    output = layer(*call, record)
    assert layer.route == f"FASTVIDEO_VSA (torch): {route}"
    torch.testing.assert_close(output[0, 0, 0, :4], torch.tensor(first).double(), atol=1e-6, rtol=0)
    assert output.sum().item() == pytest.approx(total, abs=1e-7)
    assert output.square().sum().item() == pytest.approx(squares, abs=1e-7)


def masked_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grid: Extent,
    tile: Extent,
    topk: int,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formulas of the specification in float64: a mask of tiles by their means over a dense softmax."""
    repeats = query.shape[2] // key.shape[2]
    query, key, value = query.double(), *(x.double().repeat_interleave(repeats, 2) for x in (key, value))
    tiles = partition(grid, tile).split(tile_sizes(grid, tile))
    query_means, key_means, value_means = (
        torch.stack([x[:, tokens].mean(1) for tokens in tiles], 2) for x in (query, key, value)
    )  # [B, H, tiles, D]
    scores = query_means @ key_means.mT * query.shape[-1] ** -0.5
    tile_of = torch.empty(math.prod(grid), dtype=torch.long)
    for number, tokens in enumerate(tiles):
        tile_of[tokens] = number
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(topk).indices, True)
    mask = kept[:, :, tile_of][:, :, :, tile_of]
    output = reference_attention(query, key, value, attn_mask=mask)[0]
    if gate is not None:
        output = output + gate.double() * (scores.softmax(-1) @ value_means).transpose(1, 2)[:, tile_of]
    return output


@every_executor
@pytest.mark.parametrize("gated", [False, True], ids=["no gate", "gate"])
@pytest.mark.parametrize(
    ("grid", "tile", "topk"),
    [((3, 5, 7), (2, 2, 4), 3), ((2, 9, 10), (4, 8, 8), 2), ((5, 4, 9), (4, 4, 4), 1)],
)
def test_fewer_tiles_equal_a_masked_reference(
    stand: Stand, gated: bool, grid: Extent, tile: Extent, topk: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, math.prod(grid), 4, 128)
    query, key, value, gate = (torch.randn(shape, generator=generator).to(stand.dtype) for _ in range(4))
    key, value = key[:, :, :2], value[:, :, :2]  # key heads are shared
    record = record_for(grid)
    if gated:
        record = record.with_layer_inputs(gate_compress=gate)
    with stand.kernels(publishes_grid=False) as log:
        layer = build(
            stand.platform,
            variant=stand.variant,
            heads=4,
            size=128,
            num_kv_heads=2,
            topk=topk,
            tile_size=tile,
        )
        output = layer(query, key, value, record)
        assert len(log) == 1 and layer.route == f"FASTVIDEO_VSA ({stand.variant}): VSA"
    assert output.is_contiguous() and output.dtype == stand.dtype
    expected = masked_reference(query, key, value, grid, tile, topk, gate if gated else None)
    assert_close(output, expected, {torch.float32: 2e-5}.get(stand.dtype, 3e-2))


def test_sparsity_counts_tiles_as_fastvideo_does() -> None:
    """0.7 of 10 tiles keeps 4, since 1 - 0.7 is a little more than 0.3."""
    layer = build(sparsity=0.7, tile_size=(1, 1, 2))
    made = layer.prepare(record_for((1, 2, 10)), (20, 20))
    assert (made.product.topk, made.product.tiles) == (4, 10)


def test_without_options_64_tiles_are_kept() -> None:
    made = build().prepare(record_for((1, 1, 260)), (260, 260))
    assert (made.product.topk, made.product.tiles, made.product.route) == (64, 65, "VSA")


# --- gate and coarse weight


def test_a_coarse_weight_of_one_stands_in_for_a_missing_gate_alone() -> None:
    *call, gate = spec_call()
    ones = record_for().with_layer_inputs(gate_compress=torch.ones_like(gate))
    sparse, one = build(topk=2, dtype="float64"), build(topk=2, coarse_weight="one", dtype="float64")
    torch.testing.assert_close(one(*call, record_for()), sparse(*call, ones))
    gated = record_for().with_layer_inputs(gate_compress=gate)
    torch.testing.assert_close(one(*call, gated), sparse(*call, gated))
    assert sparse.reads("gate_compress") and one.reads("gate_compress")


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        (lambda gate: gate[:, :200], ["(1, 210, 2, 8)", "(1, 200, 2, 8)"]),
        (lambda gate: gate[:, :, :1], ["(1, 210, 2, 8)", "(1, 210, 1, 8)"]),
        (lambda gate: gate[..., :4], ["(1, 210, 2, 8)", "(1, 210, 2, 4)"]),
        (lambda gate: gate.float(), ["torch.float64", "torch.float32"]),
        (lambda gate: gate.to("meta"), ["cpu", "meta"]),
    ],
)
@pytest.mark.parametrize("topk", [2, 8])
def test_a_gate_that_does_not_fit_is_refused(topk: int, wrong: Any, parts: list[str]) -> None:
    *call, gate = spec_call()
    record = record_for().with_layer_inputs(gate_compress=wrong(gate))
    with pytest.raises(MetadataError, match="gate_compress") as raised:
        build(topk=topk, dtype="float64")(*call, record)
    assert all(part in str(raised.value) for part in parts)


# --- what a record has to state


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (AttentionMetadata(), ["vsa_dit_seq_shape", "none", "210"]),
        (record_for((5, 6, 8)), ["vsa_dit_seq_shape", "5 x 6 x 8", "240", "210"]),
        (record_for((-5, -6, 7)), ["vsa_dit_seq_shape", "-5 x -6 x 7", "210"]),
        (record_for(packed_padding=PackedPadding(200, 200)), ["vsa_dit_seq_shape", "= 210", "200"]),
        (record_for(packed_padding=PackedPadding(200, 100)), ["200 and 100"]),
        (record_for(cu_seqlens_q=(0, 100, 210)), ["cu_seqlens_q"]),
        (record_for(attn_mask=torch.arange(210)[None] < 200), ["attn_mask", "(1, 210)"]),
    ],
)
def test_a_record_that_does_not_fit_is_refused_by_name_and_number(
    record: AttentionMetadata, parts: list[str]
) -> None:
    layer = build(topk=2, dtype="float64")
    text = refusal_of(lambda: layer(*spec_call()[:3], record))
    assert all(part in text for part in ('"self"', "FASTVIDEO_VSA", "TORCH_SDPA", *parts)), text


def test_a_declared_fallback_takes_such_a_step() -> None:
    config = load_config({"default": {"backend": "VSA", "fastvideo_vsa_topk": 2, "fallback": ["TORCH_SDPA"]}})
    with use_attention_config(config, platform=CPU):
        layer = Attention(2, 8, role="self", video_grid=True, dtype="float64")
    call = spec_call()[:3]
    assert_close(layer(*call, record_for((5, 6, 8))), reference_attention(*call)[0], 1e-9)
    assert layer.route == "TORCH_SDPA" and layer.fallbacks_taken == 1 and "210" in str(layer.fallback_reason)
    layer(*call, record_for())
    assert layer.route == "FASTVIDEO_VSA (torch): VSA"


@pytest.mark.parametrize("topk", [2, 64], ids=["sparse", "dense route"])
@every_executor
def test_structural_padding_is_left_out(stand: Stand, topk: int) -> None:
    """The grid is that of the first tokens; what lies behind them is neither read nor answered."""
    grid, used = (3, 4, 8), 96
    query, key, value, gate = (torch.randn(1, used + 5, 4, 128).to(stand.dtype) for _ in range(4))
    for poisoned in (query, key, value, gate):
        poisoned[:, used:] = float("nan")
    padding = PackedPadding(used, used)
    with stand.kernels(publishes_grid=False):
        layer = build(stand.platform, variant=stand.variant, heads=4, size=128, topk=topk)
        whole = layer(
            *(x[:, :used] for x in (query, key, value)),
            record_for(grid).with_layer_inputs(gate_compress=gate[:, :used]),
        )
        record = record_for(grid, packed_padding=padding).with_layer_inputs(gate_compress=gate)
        output = layer(query, key, value, record)
    assert_close(output[:, :used], whole.double())
    assert not output[:, used:].any() and output.is_contiguous()


# --- routes


def test_routes_are_told_once_counted_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    platform = current_omni_platform(CPU)
    with use_attention_config(
        load_config({"default": {"backend": "VSA", "fastvideo_vsa_topk": 7}}), platform=platform
    ):
        model = torch.nn.ModuleList(
            Attention(2, 8, role="routes", video_grid=True, dtype="float64") for _ in range(2)
        )
    small = (1, 3, 4)
    with caplog.at_level(logging.INFO, "omni_attn"):
        for grid in (GRID, GRID, small, small):
            tokens = math.prod(grid)
            prepare_attention(model, {"routes": record_for(grid)}, {"routes": (tokens, tokens)})
    told = [record for record in caplog.records if "route " in record.getMessage()]
    assert [record.levelname for record in told] == ["INFO", "WARNING"]
    assert '"routes"' in told[1].getMessage()
    for part in ("topk 7", "all 1 tiles", "1 x 3 x 4", "dense"):
        assert part in told[1].getMessage()
    assert [dict(layer.routes_taken) for layer in model] == [
        {"FASTVIDEO_VSA (torch): VSA": 2, "FASTVIDEO_VSA (torch): SDPA": 2}
    ] * 2
    (row,) = attention_report(model).rows
    assert row.route == "FASTVIDEO_VSA (torch): SDPA" and row.routes_taken == dict(model[0].routes_taken)
    for part in ("topk 7", "VSA 2 times", "SDPA 2 times"):
        assert part in str(attention_report(model))


@pytest.mark.parametrize(
    ("options", "asked"), [({"sparsity": 0.05}, "sparsity 0.05"), ({"topk": 9}, "topk 9")]
)
def test_a_route_names_the_budget_that_was_asked_for(options: dict[str, Any], asked: str) -> None:
    layer, call = build(dtype="float64", **options), spec_call()[:3]
    layer(*call, record_for())
    assert layer.route_reason is not None and layer.route_reason.startswith(f"{asked} covers all 8 tiles")


def test_a_tile_of_all_frames_reaches_beyond_the_video() -> None:
    call = spec_call()[:3]
    exact, beyond = (
        build(topk=2, tile_size=[frames, 4, 4], dtype="float64")(*call, record_for()) for frames in (5, 10**9)
    )
    assert torch.equal(exact, beyond)


def test_a_call_of_fakes_leaves_nothing_behind() -> None:
    layer, call, record = build(topk=2, dtype="float64"), spec_call()[:3], record_for((6, 7, 5))
    with FakeTensorMode() as fakes:
        assert layer(*map(fakes.from_tensor, call), record).shape == call[0].shape
    assert layer(*call, record).shape == call[0].shape


def test_both_impls_are_made_while_the_layer_is_built() -> None:
    impl = build(topk=2).impl
    assert impl is not None and type(impl.dense).__name__ == "TorchSDPAImpl"


# --- executors


def test_every_variant_has_its_executor_and_a_place_in_an_order() -> None:
    names = {variant.name for variant in VSA_VARIANTS}
    assert names == set(EXECUTORS)
    ordered = {name for row in EXECUTOR_ORDERS for name in row.order}
    assert ordered <= names and all(len(set(row.order)) == len(row.order) for row in EXECUTOR_ORDERS)
    assert all(row.order[-1] == "torch" for row in EXECUTOR_ORDERS)


def test_gradients_reach_query_key_value_and_gate() -> None:
    call = [x.requires_grad_() for x in spec_call()]
    layer = build(topk=2, dtype="float64", requires_grad=True)

    def run(query: Any, key: Any, value: Any, gate: Any) -> torch.Tensor:
        return layer(query, key, value, record_for().with_layer_inputs(gate_compress=gate))

    def expected(query: Any, key: Any, value: Any, gate: Any) -> torch.Tensor:
        return masked_reference(query, key, value, GRID, TILE, 2, gate)

    weights = torch.randn(1, TOKENS, 2, 8, dtype=torch.float64)
    got, wanted = (torch.autograd.grad((f(*call) * weights).sum(), call) for f in (run, expected))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=0)


@pytest.mark.parametrize("variant", ["fa3", "fa4", "fastvideo", "flashinfer", "flex"])
def test_a_gate_asks_for_gradients_that_an_executor_does_not_give(variant: str) -> None:
    stand = next(s for s in VSA_STANDS if s.variant == variant)
    call = [torch.randn(1, 96, 4, 128).to(stand.dtype) for _ in range(3)]
    gate = torch.randn_like(call[0]).requires_grad_()
    with stand.kernels(publishes_grid=False):
        layer = build(stand.platform, variant=variant, heads=4, size=128, topk=1)
        output = layer(*call, record_for((3, 4, 8)).with_layer_inputs(gate_compress=gate))
        assert output.requires_grad
        with pytest.raises(RuntimeError, match="backward"):
            output.sum().backward()


@every_executor
@pytest.mark.parametrize("gated", [False, True], ids=["no gate", "gate"])
def test_compiled_code_holds_one_operator(stand: Stand, gated: bool) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    call = [torch.randn(1, 96, 4, 128).to(stand.dtype) for _ in range(4)]
    record = record_for((3, 4, 8))
    with stand.kernels(publishes_grid=False), torch.no_grad():
        layer = build(stand.platform, variant=stand.variant, heads=4, size=128, topk=1)
        prepare_attention(layer, {"self": record}, {"self": (96, 96)})
        compiled = torch.compile(layer, fullgraph=True, backend=keep)
        for step in range(2):
            given = record.at_step(step)
            if gated:
                given = given.with_layer_inputs(gate_compress=call[3])
            assert torch.equal(compiled(*call[:3], given), layer(*call[:3], given))
    (graph,) = graphs
    called = [
        node for node in graph.graph.nodes if node.op == "call_function" and "omni_attn" in str(node.target)
    ]
    assert len(called) == 1
    torch._dynamo.reset()


def test_an_empty_sequence_needs_no_grid() -> None:
    empty = torch.empty(1, 0, 2, 8)
    assert build()(empty, empty, empty, AttentionMetadata()).shape == (1, 0, 2, 8)


def test_it_is_chosen_by_name_alone() -> None:
    with use_attention_config(AttentionConfig(), platform=CPU):
        layer = Attention(2, 8, role="self", video_grid=True)
    assert layer.selection is not None and layer.selection.backend == "TORCH_SDPA"
