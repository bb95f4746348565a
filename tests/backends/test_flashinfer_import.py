"""FlashInfer missing, broken, without a function, or of a version with other parameters: each has its own text."""

from __future__ import annotations

from typing import Any

import pytest

from omni_attn.backends.flashinfer_kernels import import_flashinfer
from omni_attn.errors import BackendImportError
from omni_attn.testing import fake_kernels, fake_package
from omni_attn.testing.standins.flashinfer import FlashInferStandIn, RaggedWrapperStandIn
from omni_attn.testing.standins.log import CallLog

VARIANTS = ("cute-dsl", "fa3", "fa2")
COMMAND = 'pip install "omni-attn[flashinfer]"'


def text_of(variant: str) -> str:
    with pytest.raises(BackendImportError) as raised:
        import_flashinfer(variant)
    assert f"FLASHINFER_ATTN ({variant})" in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_not_installed(variant: str) -> None:
    text = text_of(variant)
    assert "not installed" in text and COMMAND in text


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "error", [ImportError("undefined symbol: x"), OSError("libcudart"), ModuleNotFoundError("no tvm_ffi")]
)
def test_broken(variant: str, error: Exception) -> None:
    module = "flashinfer.prefill" if variant == "cute-dsl" else "flashinfer"
    with fake_package(module, raises=error):
        text = text_of(variant)
    assert "broken" in text and str(error) in text and COMMAND in text and "not installed" not in text


def test_the_cute_dsl_itself_is_missing() -> None:
    """FlashInfer imports it at the first call; a layer asks when it is built."""
    missing = ModuleNotFoundError("No module named 'cutlass'", name="cutlass")
    with (
        fake_kernels("FLASHINFER_ATTN"),
        fake_package("flashinfer.attention.cute_dsl.fmha", raises=missing),
    ):
        assert "No module named 'cutlass'" in text_of("cute-dsl")
        assert import_flashinfer("fa3").variant == "fa3"


@pytest.mark.parametrize("variant", ["fa3", "fa2"])
def test_a_function_is_missing(variant: str) -> None:
    with fake_package("flashinfer", BatchPrefillWithRaggedKVCacheWrapper=RaggedWrapperStandIn):
        text = text_of(variant)
    assert "has no single_prefill_with_kv_cache" in text and COMMAND in text


def test_a_parameter_is_missing() -> None:
    class Other(RaggedWrapperStandIn):
        def run(self, q: Any, k: Any, v: Any, *, out: Any = None) -> Any:
            return out

    single = FlashInferStandIn(CallLog()).single_prefill_with_kv_cache
    with fake_package(
        "flashinfer", BatchPrefillWithRaggedKVCacheWrapper=Other, single_prefill_with_kv_cache=single
    ):
        text = text_of("fa3")
    assert "Other.run takes no return_lse" in text and COMMAND in text


def test_each_variant_has_its_entry_points() -> None:
    with fake_kernels("FLASHINFER_ATTN"):
        loaded = {variant: import_flashinfer(variant) for variant in VARIANTS}
    assert [loaded[v].single is not None for v in VARIANTS] == [False, False, True]
    assert {v: k.variant for v, k in loaded.items()} == {v: v for v in VARIANTS}
