"""quant of FLASHINFER_ATTN: what is accepted, and what quantised values do to the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, PackedPadding, use_attention_config
from omni_attn.backends.flashinfer_attn import FlashInferBackend
from omni_attn.backends.flashinfer_quant import quantise_values
from omni_attn.config import AttentionSpec
from omni_attn.errors import BackendRejectedError
from omni_attn.facts import DeviceInfo
from omni_attn.ops.reference import reference_attention
from omni_attn.testing import fake_device, fake_kernels
from tests.layer.stands import tensors
from tests.selection.stubs import ask

PACKAGES = {"flashinfer-python": "0.6.18"}
B200, H200, GEFORCE = (fake_device(name, packages=PACKAGES) for name in ("sm_100", "sm_90", "sm_120"))
FP8 = {"dtype_vo": "fp8_e4m3"}


def spec_of(quant: dict[str, Any], variant: str | None = None) -> AttentionSpec:
    return AttentionSpec.model_validate({"backend": "FLASHINFER_ATTN", "variant": variant, "quant": quant})


@pytest.mark.parametrize(
    ("quant", "device", "needs", "variant"),
    [
        (FP8, B200, {}, "cute-dsl"),
        ({**FP8, "dtype_qk": "bfloat16"}, B200, {}, "cute-dsl"),
        ({**FP8, "dtype_qk": "float16"}, B200, {}, "cute-dsl"),
        (FP8, B200, {"dtype": None}, "cute-dsl"),
        ({}, H200, {}, "fa3"),
        ({"dtype_qk": "float16", "dtype_vo": "float16"}, H200, {}, "fa3"),
        ({"dtype_vo": "bfloat16"}, H200, {}, "fa3"),
        ({"dtype_qk": "float16"}, GEFORCE, {"head_size": 64}, "fa2"),
    ],
)
def test_accepted(quant: dict[str, Any], device: DeviceInfo, needs: dict[str, Any], variant: str) -> None:
    request, spec = ask(**needs), spec_of(quant)
    assert FlashInferBackend.validate_configuration(request, device, spec) == []
    assert FlashInferBackend.select_variant(request, device, spec) == variant


@pytest.mark.parametrize(
    ("quant", "variant", "device", "needs", "words"),
    [
        ({"dtype_qk": "int8"}, None, B200, {}, ["dtype_qk", "int8"]),
        ({"dtype_qk": "fp8_e4m3", **FP8}, None, B200, {}, ["dtype_qk", "fp8_e4m3"]),
        ({"dtype_vo": "int8"}, None, B200, {}, ["dtype_vo", "int8"]),
        ({"dtype_vo": "float16"}, None, H200, {}, ["dtype_vo", "bfloat16", "float16"]),
        ({"dtype_qk": "float16", "dtype_vo": "bfloat16"}, None, H200, {}, ["dtype_vo", "float16"]),
        (FP8, None, H200, {}, ["10.x", "9.0", "fp8_e4m3"]),
        (FP8, None, GEFORCE, {}, ["10.x", "12.0", "fp8_e4m3"]),
        (FP8, "fa2", B200, {}, ["variant cute-dsl", "fa2"]),
        (FP8, None, B200, {"head_size": 64}, ["head_size", "128", "64"]),
        (FP8, None, B200, {"mask_usage": "padding"}, ["attn_mask"]),
        ({"q_block_size": 4}, None, B200, {}, ["q_block_size", "1", "4"]),
        ({"k_block_size": 4}, None, H200, {}, ["k_block_size", "16", "4"]),
    ],
)
def test_refused(
    quant: dict[str, Any],
    variant: str | None,
    device: DeviceInfo,
    needs: dict[str, Any],
    words: list[str],
) -> None:
    reasons = "; ".join(
        FlashInferBackend.validate_configuration(ask(**needs), device, spec_of(quant, variant))
    )
    assert all(word in reasons for word in ("needs", "found", *words)), reasons
    with (
        use_attention_config({"default": spec_of(quant, variant)}, platform=device),
        pytest.raises(BackendRejectedError),
    ):
        Attention(2, **{"head_size": 128, "role": "self", "dtype": "bfloat16", **needs})


def run(
    quant: dict[str, Any], call: tuple[torch.Tensor, ...], record: AttentionMetadata | None = None
) -> torch.Tensor:
    with (
        fake_kernels("FLASHINFER_ATTN", "cute-dsl"),
        use_attention_config({"default": spec_of(quant)}, platform=B200),
    ):
        layer = Attention(call[0].shape[2], 128, role="self", num_kv_heads=call[1].shape[2])
        return layer(*call, record)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return ((output.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_values_of_any_size_keep_their_relative_error(dtype: torch.dtype, size: float) -> None:
    """448 is the largest float8_e4m3fn: an unscaled cast of the last would be NaN, of the first mostly zeros."""
    query, key, value = (x.to(dtype) for x in tensors(2, 6, 9, size=128, kv_heads=2))
    value = (value * size).to(dtype)
    assert bool(value.isfinite().all())
    output = run(FP8, (query, key, value))
    error = relative_error(output, reference_attention(query, key, value)[0])
    assert output.dtype == dtype and 1e-3 < error < 4e-2


def test_the_scale_is_that_of_the_largest_value() -> None:
    value = torch.tensor([0.5, -3.0, 2.0], dtype=torch.bfloat16)
    quantised, scale = quantise_values(value)
    assert quantised.dtype == torch.float8_e4m3fn and scale.dtype == torch.bfloat16 and scale.dim() == 0
    assert abs(scale.item() * 448 / 3.0 - 1) < 4e-3
    assert quantised.float().abs().max() == 448
    nothing, floor = quantise_values(torch.zeros(3))
    assert not nothing.float().any() and floor == torch.tensor(1e-6)


def test_tokens_behind_the_last_boundary_do_not_reach_the_scale() -> None:
    query, key, value = (x.bfloat16() for x in tensors(1, 6, 6, size=128))
    expected = reference_attention(query[:, :4], key[:, :5], value[:, :5])[0]
    value[:, 5:] = float("nan")
    record = AttentionMetadata(packed_padding=PackedPadding(q_length=4, kv_length=5))
    output = run(FP8, (query, key, value), record)
    assert relative_error(output[:, :4], expected) < 4e-2 and not output[:, 4:].any()


def test_queries_and_keys_run_in_the_type_that_was_asked_for() -> None:
    call = tuple(x.bfloat16() for x in tensors(1, 6, 6, size=128))
    output = run({"dtype_qk": "float16", "dtype_vo": "float16"}, call)
    in_half = run({}, tuple(x.half() for x in call))
    assert output.dtype == torch.bfloat16 and torch.equal(output, in_half.bfloat16())


def test_quantised_layers_compile_alike() -> None:
    call = tuple(x.bfloat16() for x in tensors(1, 6, 6, size=128))
    torch._dynamo.reset()
    with (
        fake_kernels("FLASHINFER_ATTN", "cute-dsl"),
        use_attention_config({"default": spec_of(FP8)}, platform=B200),
        torch.no_grad(),
    ):
        layer = Attention(4, 128, role="self")
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*call), layer(*call))
