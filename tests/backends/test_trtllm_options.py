"""TRTLLM_ATTN's options: quantisation around its blocks, and skip-softmax from threshold, calibration and gate."""

from __future__ import annotations

import logging
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from omni_attn import AttentionMetadata, PackedPadding, attention_report, prepare_attention
from omni_attn.backends import trtllm_parts
from omni_attn.calibration import SkipSoftmaxCurve
from omni_attn.errors import MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.ops.skip_softmax import skip_softmax_attention
from omni_attn.testing import fake_kernels
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.trtllm import APIS, TILE, trtllm_stand_in
from tests.backends.trtllm_layers import build_layer, relative_error, tensors

QUANT = {"dtype_qk": "fp8_e4m3"}
GATED = {"threshold": 0.3, "disabled_until_timestep": 0.86}
SHORT = (1, 14, 15, 16, 17, 127, 128, 129)
QUANTISE, RAGGED = "trtllm_sage_attention_quantize", "trtllm_ragged_attention_deepseek"


# -- quant


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("blocks", [(1, 16), (16, 16), (4, 4), (1, 1)])
def test_quantised_attention_is_near_and_no_block_straddles_items(
    api: str, dtype: str, blocks: tuple[int, int]
) -> None:
    query, key, value = tensors(3, 37, 45)
    key = key + 3.0  # what all keys share costs nothing
    query = query * torch.tensor([0.05, 1.0, 1.5])[:, None, None, None].bfloat16()
    quant = {"dtype_qk": dtype, "q_block_size": blocks[0], "k_block_size": blocks[1]}
    with trtllm_stand_in(CallLog(), "ragged", api):
        layer = build_layer(quant=quant)
        output = layer(query, key, value)
    assert layer.route == f"TRTLLM_ATTN (ragged): quantised {dtype}"
    expected = reference_attention(query, key, value)[0]
    for item in range(3):
        assert relative_error(output[item], expected[item]) < 0.1


@pytest.mark.parametrize("q_block", [1, 16])
def test_b37_calls_shorter_than_a_block_run_dense(q_block: int) -> None:
    with fake_kernels("TRTLLM_ATTN", "ragged") as log:
        layer = build_layer(quant=QUANT | {"q_block_size": q_block, "k_block_size": 16})
        for queries, keys in product(SHORT, SHORT):
            call, before = tensors(1, queries, keys), len(log)
            output = layer(*call)
            fits = queries >= q_block and keys >= 16
            assert log.calls[before:] == ([QUANTISE, RAGGED] if fits else [RAGGED])
            assert ("quantised" in layer.route, "shorter than a" in layer.route) == (fits, not fits)
            assert bool(output.isfinite().all())
            error = relative_error(output, reference_attention(*call)[0])
            assert error < (0.1 if fits else 3e-3), (queries, keys)
        empty = layer(*tensors(1, 5, 0))
    assert empty.shape == (1, 5, 2, 128) and not empty.any()


def test_short_documents_among_long_ones_run_dense() -> None:
    bounds, call = (0, 20, 34, 40, 80), tensors(1, 80, 80)
    with fake_kernels("TRTLLM_ATTN", "ragged") as log:
        layer = build_layer(quant=QUANT)
        output = layer(*call, AttentionMetadata(cu_seqlens_q=bounds))
    assert log.calls == [QUANTISE, RAGGED, RAGGED, QUANTISE, RAGGED]
    assert "quantised fp8_e4m3" in layer.route and "dense" in layer.route
    for start, end in pairwise(bounds):
        rows = slice(start, end)
        expected = reference_attention(*(x[:, rows] for x in call))[0]
        assert relative_error(output[:, rows], expected) < (3e-3 if end - start < 16 else 0.1)


def test_padding_is_cut_before_it_is_quantised() -> None:
    call = tensors(1, 64, 64)
    for tensor in call:
        tensor[:, 58:] = float("nan")
    with fake_kernels("TRTLLM_ATTN", "ragged"):
        output = build_layer(quant=QUANT)(*call, AttentionMetadata(packed_padding=PackedPadding(58, 58)))
    assert relative_error(output[:, :58], reference_attention(*(x[:, :58] for x in call))[0]) < 0.1
    assert not output[:, 58:].any()


@pytest.mark.parametrize(
    ("variant", "options", "word"),
    [
        ("ragged", {"quant": QUANT}, "ragged"),
        ("fmha_v2", {"skip_softmax": {"threshold": 0.1}}, "threshold"),
    ],
)
def test_options_that_need_lengths_refuse_boundaries_on_the_device(
    variant: str, options: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_attn.backends.stated._on_host", lambda boundaries: None)
    record = AttentionMetadata(cu_seqlens_q=torch.tensor([0, 20, 40], dtype=torch.int32))
    with fake_kernels("TRTLLM_ATTN", variant), pytest.raises(MetadataError) as caught:
        build_layer(variant, **options)(*tensors(1, 40, 40), record)
    assert word in str(caught.value) and "tuples of ints" in str(caught.value)


# -- skip_softmax: the number that the kernel gets


def factor_of(layer: Any, length: int, **record: Any) -> tuple[float | None, str | None]:
    product_ = layer.prepare(AttentionMetadata(**record), (length, length)).product
    return product_.whole.factor, product_.route


@pytest.mark.parametrize(("length", "factor"), [(32760, 1638.0), (75600, 3780.0)])
def test_a_threshold_is_multiplied_by_the_length(length: int, factor: float) -> None:
    with fake_kernels("TRTLLM_ATTN", "ragged"):
        layer = build_layer(skip_softmax={"threshold": 0.05})
        assert factor_of(layer, length) == (pytest.approx(factor), f"skip-softmax factor {factor:g}")
        assert layer.route == f"TRTLLM_ATTN (ragged): skip-softmax factor {factor:g}"
        assert layer.route in str(attention_report(layer))


def test_a_target_sparsity_is_translated_by_the_curve_whatever_the_length() -> None:
    with fake_kernels("TRTLLM_ATTN", "ragged"):
        layer = build_layer(skip_softmax={"target_sparsity": 0.7})
        layer.calibrate(SkipSoftmaxCurve(2822.6209952, 4.3882506235))
        for length in (32760, 75600):
            assert factor_of(layer, length)[0] == pytest.approx(60912.68, abs=0.01)


@pytest.mark.parametrize("variant", ["ragged", "fmha_v2"])
@pytest.mark.parametrize("threshold", [0.0, 1e-12])
def test_nothing_skipped_equals_dense(variant: str, threshold: float) -> None:
    call = tensors(2, 40, 40)
    with fake_kernels("TRTLLM_ATTN", variant):
        plain = build_layer(variant)(*call)
        layer = build_layer(variant, skip_softmax={"threshold": threshold})
        torch.testing.assert_close(layer(*call), plain, rtol=0, atol=0 if threshold == 0 else 1e-2)
    assert ("skip-softmax" in layer.route) == (threshold > 0)


@pytest.mark.parametrize(("variant", "queries"), [("ragged", 40), ("ragged", 64), ("fmha_v2", 64)])
def test_what_is_skipped_is_what_the_reference_skips(variant: str, queries: int) -> None:
    query, key, value = tensors(2, queries, 64)
    key = key * torch.linspace(3.0, 0.1, 64)[None, :, None, None].bfloat16()
    with fake_kernels("TRTLLM_ATTN", variant):
        output = build_layer(variant, skip_softmax={"threshold": 0.3})(query, key, value)
    expected, skipped = skip_softmax_attention(
        query, key, value, threshold=0.3, tile_queries=TILE, tile_keys=TILE
    )
    assert skipped.any() and relative_error(output, expected) < 3e-3
    assert relative_error(output, reference_attention(query, key, value)[0]) > 1e-2


def test_documents_of_unequal_length_keep_one_threshold() -> None:
    """Kernels divide by each sequence's own length, so unequal ones get calls of their own."""
    bounds, call = (0, 16, 32, 80), tensors(1, 80, 80)
    call[1][:] *= torch.linspace(3.0, 0.1, 80)[None, :, None, None].bfloat16()
    with fake_kernels("TRTLLM_ATTN", "fmha_v2") as log:
        output = build_layer("fmha_v2", skip_softmax={"threshold": 0.3})(
            *call, AttentionMetadata(cu_seqlens_q=bounds)
        )
    assert len(log) == 2
    for start, end in pairwise(bounds):
        part = [x[:, start:end] for x in call]
        expected = skip_softmax_attention(*part, threshold=0.3, tile_queries=TILE, tile_keys=TILE)[0]
        assert relative_error(output[:, start:end], expected) < 3e-3


def test_a_target_sparsity_without_calibration_says_what_to_do() -> None:
    with fake_kernels("TRTLLM_ATTN", "ragged") as log:
        layer = build_layer(skip_softmax={"target_sparsity": 0.65})
        with pytest.raises(
            MetadataError, match=r"target_sparsity=0\.65.*calibrate\(SkipSoftmaxCurve"
        ) as caught:
            layer(*tensors(1, 8, 8))
    assert "TRTLLM_ATTN" in str(caught.value) and not log.calls


def test_layers_of_other_calibration_prepare_apart() -> None:
    curves = (SkipSoftmaxCurve(10.0, 1.0), SkipSoftmaxCurve(20.0, 1.0), "dense")
    with fake_kernels("TRTLLM_ATTN", "ragged"):
        layers = torch.nn.ModuleList(build_layer(skip_softmax={"target_sparsity": 0.0}) for _ in range(4))
        for layer, curve in zip(layers, (*curves, curves[0]), strict=True):
            layer.calibrate(curve)
        record = AttentionMetadata()
        prepare_attention(layers, {"self": record}, {"self": (64, 64)})
    routes = [layer.route.partition(": ")[2] for layer in layers]
    assert routes == [
        "skip-softmax factor 10",
        "skip-softmax factor 20",
        "dense: calibration",
        "skip-softmax factor 10",
    ]
    assert layers[0].group_id == layers[3].group_id and len(record.memo) == 3
    assert len(attention_report(layers)) == 3


# -- the timestep gate


def test_steps_above_the_gate_are_dense() -> None:
    sigmas = [1.0, 0.95, 0.86, 0.5, 0.0]
    with fake_kernels("TRTLLM_ATTN", "ragged"):
        layer = build_layer(skip_softmax={"threshold": 0.05, "disabled_until_timestep": 0.86})
        record, seen = AttentionMetadata(), []
        for step, sigma in enumerate(sigmas):
            record = record.at_step(step, num_steps=5, sigma=sigma)
            layer.prepare(record, (100, 100))
            seen.append(layer.route.partition(": ")[2])
    assert seen == ["dense: timestep gate"] * 2 + ["skip-softmax factor 5"] * 3


def test_without_a_gate_one_product_serves_every_step() -> None:
    with fake_kernels("TRTLLM_ATTN", "ragged"):
        layer = build_layer(skip_softmax={"threshold": 0.05})
        first = AttentionMetadata().at_step(0, sigma=1.0)
        made = layer.prepare(first, (100, 100))
        assert layer.prepare(first.at_step(1, sigma=0.5), (100, 100)) is made
        assert "sigma" not in made.reads


def test_a_gate_without_sigma_stays_dense_and_warns_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trtllm_parts, "_logged", set())
    with fake_kernels("TRTLLM_ATTN", "ragged"), caplog.at_level(logging.WARNING, "omni_attn"):
        layer = build_layer(skip_softmax={"threshold": 0.05, "disabled_until_timestep": 0.86})
        for step in range(3):
            layer.prepare(AttentionMetadata(step=step), (100, 100))
    assert layer.route.endswith("dense: no sigma for the timestep gate")
    assert sum("sigma" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("quantised", [False, True])
def test_options_survive_compilation(quantised: bool) -> None:
    """One frame for equal layers, and the eager numbers."""
    options: dict[str, Any] = {"skip_softmax": {"threshold": 0.3}} | ({"quant": QUANT} if quantised else {})
    call = tensors(2, 40, 40)
    with fake_kernels("TRTLLM_ATTN", "ragged"), torch.no_grad():
        model = torch.nn.ModuleList(build_layer(**options) for _ in range(3))
        record = AttentionMetadata()
        prepare_attention(model, {"self": record}, {"self": (40, 40)})
        expected = [layer(*call, record) for layer in model]
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(lambda layer: layer(*call, record), backend=counter, fullgraph=True)
        for layer, output in zip(model, expected, strict=True):
            assert torch.equal(compiled(layer), output)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "options", [{"quant": QUANT}, {"skip_softmax": {"threshold": 0.3}}, {"skip_softmax": GATED}]
)
def test_a_compiled_call_without_a_record_builds_in_its_trace(options: dict[str, Any]) -> None:
    call = tensors(2, 40, 40)
    with fake_kernels("TRTLLM_ATTN", "ragged"), torch.no_grad():
        layer = build_layer(**options)
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*call), layer(*call))
