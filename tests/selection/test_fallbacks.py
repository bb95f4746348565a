"""The list of fallbacks that a person writes: at selection, at a step's refusal, and never after a kernel ran."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import pytest
import torch

from omni_attn import Attention, prepare_attention
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.config import AttentionSpec
from omni_attn.errors import BackendImportError, MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.report import attention_report
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device, fake_kernels, fake_package
from tests.selection.stubs import ask, choose

CPU = fake_device("cpu")
H100 = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"}, cudnn=91900)
TWO_FLASH = fake_device("sm_90", packages={"fa3-fwd": "0.0.3", "flash-attn": "2.8.3"})
FLASH_THEN_SDPA = {"backend": "FLASH_ATTN", "fallback": ["TORCH_SDPA"]}


def build(device: Any, spec: object, **needs: Any) -> Attention:
    with use_attention_config({"default": spec}, platform=device, dtype="bfloat16"):
        return Attention(2, 16, **({"role": "self"} | needs))


def tensors(tokens: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, tokens, 2, 16, generator=generator).bfloat16() for _ in range(3)]


def test_the_first_accepted_fallback_runs_and_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    wanted = {"backend": "FLASH_ATTN", "fallback": ["CUDNN_ATTN", "TORCH_SDPA"]}
    with caplog.at_level(logging.INFO, "omni_attn"):
        layers = torch.nn.ModuleList(build(CPU, wanted, role="fallback_shown") for _ in range(2))
    selection = layers[0].selection
    assert selection is not None
    assert (selection.backend, selection.source, selection.is_fallback) == ("TORCH_SDPA", "default", True)
    assert selection.spec == AttentionSpec(backend="TORCH_SDPA")
    assert [v.accepted for v in selection.verdicts] == [False, False, True]
    [row] = attention_report(layers).rows
    for text in (selection.reason(), row.reason):
        assert "FLASH_ATTN" in text and "CUDNN_ATTN" in text and "cpu" in text
    records = [record for record in caplog.records if "fallback_shown" in record.getMessage()]
    assert [record.levelno for record in records] == [logging.WARNING]
    assert "TORCH_SDPA" in records[0].getMessage() and "FLASH_ATTN" in records[0].getMessage()


def test_a_full_spec_as_fallback_brings_its_options() -> None:
    device = fake_device("sm_90", packages={"flash-attn": "2.8.3"})
    spec = {"backend": "CUDNN_ATTN", "fallback": [{"backend": "FLASH_ATTN", "variant": "fa2"}, "TORCH_SDPA"]}
    selection = select(ask(), choose({"default": spec}), device)
    assert selection.spec == AttentionSpec(backend="FLASH_ATTN", variant="fa2") and selection.variant == "fa2"


def test_an_accepted_choice_ignores_its_fallbacks() -> None:
    spec = {"backend": "CUDNN_ATTN", "fallback": ["TORCH_SDPA"]}
    selection = select(ask(), choose({"default": spec}), H100)
    assert selection.backend == "CUDNN_ATTN" and not selection.is_fallback
    assert selection.spec == AttentionSpec(**spec)  # type: ignore[arg-type]


def test_a_step_that_the_choice_cannot_express_takes_the_fallback(caplog: pytest.LogCaptureFixture) -> None:
    query, key, value = tensors()
    mask = torch.rand(1, 2, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.3
    with fake_kernels("FLASH_ATTN", "fa3") as kernel, caplog.at_level(logging.WARNING, "omni_attn"):
        layer = build(H100, FLASH_THEN_SDPA, role="step_fallback")
        for _ in range(2):
            masked = AttentionMetadata(attn_mask=mask)
            prepare_attention(layer, {"step_fallback": masked}, lengths={"step_fallback": (6, 6)})
            output = layer(query, key, value, masked)
            assert "TORCH_SDPA" in layer.route and not kernel.calls
        expected = reference_attention(query, key, value, attn_mask=mask)[0]
        torch.testing.assert_close(output.double(), expected, atol=2e-2, rtol=0)
        [row] = attention_report(layer).rows
        assert "TORCH_SDPA" in row.route and row.fallbacks_taken == 2 and row.backend == "FLASH_ATTN"
        layer(query, key, value, AttentionMetadata())
        assert "FLASH_ATTN" in layer.route and len(kernel) == 1
    lines = [r.getMessage() for r in caplog.records if "step_fallback" in r.getMessage()]
    assert len(lines) == 1 and "TORCH_SDPA" in lines[0] and "attn_mask" in lines[0]


def test_without_a_fallback_the_step_is_an_error() -> None:
    query, key, value = tensors()
    with fake_kernels("FLASH_ATTN", "fa3") as kernel:
        layer = build(H100, "FLASH_ATTN")
        record = AttentionMetadata(attn_mask=torch.ones(1, 2, 6, 6, dtype=torch.bool).tril())
        with pytest.raises(MetadataError, match=r"FLASH_ATTN.*attn_mask"):
            layer(query, key, value, record)
    assert not kernel.calls


@pytest.mark.parametrize("spec", ["FLASH_ATTN", FLASH_THEN_SDPA, None], ids=["choice", "fallback", "default"])
def test_a_kernel_that_fails_is_never_retried_elsewhere(spec: object) -> None:
    calls = []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    functions = {"flash_attn_func": failing, "flash_attn_varlen_func": failing}
    with fake_package("flash_attn_interface", **functions):
        layer = build(H100, spec, mask_usage="never")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            layer(*tensors())
    assert len(calls) == 1


def test_a_broken_variant_does_not_speak_against_another_one() -> None:
    """Whether a fallback may mend a broken package or not: what is wrong with fa3 is no reason against fa2."""
    spec = {
        "backend": "FLASH_ATTN",
        "variant": "fa3",
        "fallback": [{"backend": "FLASH_ATTN", "variant": "fa2"}],
    }
    broken = fake_package("flash_attn_interface", raises=ImportError("undefined symbol: x"))
    with broken, fake_kernels("FLASH_ATTN", "fa2"), suppress(BackendImportError):
        selection = build(TWO_FLASH, spec).selection
        assert selection is not None and selection.variant == "fa2"
