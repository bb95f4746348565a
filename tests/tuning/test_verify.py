"""Every usable kernel goes through the conformance tests; what is wrong is found, what is coarse is allowed for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn.facts import BackendFacts
from omni_attn.testing.harness import TOLERANCE, allowed_error
from omni_attn.tuning import verify as verifying
from omni_attn.tuning.verify import Verification, verify
from tests.selection.stubs import FLOATS, PlainBackend, registered
from tests.tuning.stubs import (
    AbsentBackend,
    CoarseBackend,
    CrashingBackend,
    GuessingBackend,
    NaNBackend,
    VariantsBackend,
    WrongBackend,
    cpu,
    pair,
)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Verifies some backends alone."""

    def run(*names: str) -> dict[str, Verification]:
        every = verifying.every_spec
        monkeypatch.setattr(
            verifying, "every_spec", lambda platform: [s for s in every(platform) if s.backend in names]
        )
        found = list(verify(cpu()))
        monkeypatch.setattr(verifying, "every_spec", every)
        return {v.backend if v.variant is None else f"{v.backend}:{v.variant}": v for v in found}

    return run


def test_every_registered_backend_is_listed() -> None:
    with registered(pair(PlainBackend)):
        found = {(v.backend, v.variant): v for v in verify(cpu())}
    assert {("TORCH_SDPA", None), ("FLASH_ATTN", "fa3"), ("FLASH_ATTN", "fa2"), ("PLAIN_TEST", None)} <= set(
        found
    )
    sdpa, plain = found["TORCH_SDPA", None], found["PLAIN_TEST", None]
    assert (sdpa.dtype, sdpa.head_size, sdpa.allowed) == ("float32", 128, 1e-5)
    assert not sdpa.failed and not sdpa.reasons and len(sdpa.passed) >= 20 and not sdpa.skipped
    assert not plain.failed and set(plain.skipped) == {
        "test_causal_with_a_mask",
        "test_prefix_lengths_beside_the_mask",
    }
    for verification in found.values():
        assert bool(verification.reasons) == (verification.dtype is None)
    assert "needs a cuda device, found cpu" in found["FLASH_ATTN", "fa3"].reasons


def test_wrong_numbers_are_found(only: Any) -> None:
    with registered(pair(WrongBackend), pair(CrashingBackend)):
        found = only("WRONG_TEST", "CRASHING_TEST")
    wrong, crashing = found["WRONG_TEST"], found["CRASHING_TEST"]
    assert "test_dense_equals_reference" in wrong.failed
    assert "against float64, allowed 1.0e-05" in wrong.failed["test_dense_equals_reference"]
    assert (wrong.result, wrong.raised) == ("wrong", ())
    assert (crashing.result, set(crashing.raised)) == ("failed", set(crashing.failed))
    assert crashing.failed["test_dense_equals_reference"] == "RuntimeError: illegal memory access"


def test_a_wrong_result_beside_an_exception_is_wrong(only: Any) -> None:
    with registered(pair(NaNBackend)):  # its answers have no gradients
        found = only("NAN_TEST")["NAN_TEST"]
    assert found.raised == ("test_backward",) and len(found.failed) > 1
    assert found.result == found.to_dict()["result"] == "wrong"


def test_what_the_facts_document_is_allowed_for(only: Any) -> None:
    class Lying(CoarseBackend):
        """As coarse as the other, and documents a tenth of it."""

        facts = BackendFacts(dtypes=FLOATS, numerics="quantised", error="2e-3")

        @staticmethod
        def get_name() -> str:
            return "LYING_TEST"

    with registered(pair(CoarseBackend), pair(Lying)):
        found = only("COARSE_TEST", "LYING_TEST")
    coarse, lying = found["COARSE_TEST"], found["LYING_TEST"]
    assert coarse.allowed == pytest.approx(0.1)
    assert "test_dense_equals_reference" in coarse.passed
    assert lying.allowed == pytest.approx(0.01)
    assert "test_dense_equals_reference" in lying.failed


def test_allowed_error() -> None:
    exact = BackendFacts(error="2.3e-3")
    assert all(allowed_error(exact, dtype) == limit for dtype, limit in TOLERANCE.items())
    quantised = BackendFacts(numerics="quantised", error="1.3e-2")
    assert allowed_error(quantised, torch.bfloat16) == pytest.approx(6.5e-2)
    nearly_exact = BackendFacts(numerics="quantised", error="1e-3")
    assert allowed_error(nearly_exact, torch.bfloat16) == TOLERANCE[torch.bfloat16]
    assert allowed_error(BackendFacts(numerics="quantised"), torch.float16) == TOLERANCE[torch.float16]


def test_what_cannot_be_verified_says_why(only: Any) -> None:
    with registered(
        pair(AbsentBackend), pair(GuessingBackend), pair(VariantsBackend), ("GONE_TEST", "no.such.Class")
    ):
        found = only("ABSENT_TEST", "GUESSING_TEST", "VARIANTS_TEST", "GONE_TEST")
    assert "pip install nothing" in found["ABSENT_TEST"].reasons[0]
    assert "document no error" in found["GUESSING_TEST"].reasons[0]
    assert "needs a musa device, found cpu" in found["VARIANTS_TEST:there"].reasons
    assert "no.such" in found["GONE_TEST"].reasons[0]
    assert found["VARIANTS_TEST:here"].passed and not found["VARIANTS_TEST:here"].failed
    assert not any(v.failed for v in found.values())


def test_dtype_and_head_size_are_those_of_the_kernel(only: Any) -> None:
    from omni_attn.facts import HeadSizes

    class Narrow(PlainBackend):
        facts = BackendFacts(dtypes=frozenset({"bfloat16"}), head_sizes=HeadSizes(allowed=(64, 32)))

        @staticmethod
        def get_name() -> str:
            return "NARROW_TEST"

    with registered(pair(Narrow)):
        narrow = only("NARROW_TEST")["NARROW_TEST"]
    assert (narrow.dtype, narrow.head_size, narrow.allowed) == ("bfloat16", 64, 2e-2)
    assert narrow.passed and not narrow.failed


def test_after_a_device_error_nobody_is_blamed(only: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_device_error", lambda device: True)
    with registered(pair(WrongBackend), pair(PlainBackend)):
        found = list(only("WRONG_TEST", "PLAIN_TEST").values())
    assert found[0].failed and not found[0].reasons
    assert found[1].reasons == ("not run: the device is in an error state since WRONG_TEST",)


def test_a_backend_that_selects_tiles_is_verified_with_all_of_them(only: Any) -> None:
    found = only("FASTVIDEO_VSA")
    torch_executor = found["FASTVIDEO_VSA:torch"]
    assert torch_executor.result == "right" and torch_executor.allowed == 1e-5, torch_executor.failed
    assert len(torch_executor.passed) >= 18
    assert "needs a cuda" in " ".join(found["FASTVIDEO_VSA:fa3"].reasons)
