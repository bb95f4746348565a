"""FLASH_ATTN on ROCm, NPU, XPU and MUSA: what is special about each kernel, and what is said when one is missing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from omni_attn.backends.flash_attn_musa import MATE_PACKAGE, MateFlashBackend
from omni_attn.backends.flash_attn_npu import MINDIE_PACKAGE, MindieFlashBackend
from omni_attn.backends.flash_attn_rocm import AITER_PACKAGE, AiterFlashBackend
from omni_attn.backends.flash_attn_xpu import XPU_PACKAGE, XpuFlashBackend, _kept_bounds
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.stated import Packed
from omni_attn.errors import BackendImportError, MetadataError
from omni_attn.facts import PackageRequirement
from omni_attn.ops.reference import reference_attention
from omni_attn.products import build_product
from omni_attn.testing import fake_kernels, fake_package

SIZE = 64
BACKENDS: dict[str, Any] = {
    "aiter": AiterFlashBackend,
    "mindiesd": MindieFlashBackend,
    "vllm-xpu-kernels": XpuFlashBackend,
    "mate": MateFlashBackend,
}
PACKAGES = {
    "aiter": AITER_PACKAGE,
    "mindiesd": MINDIE_PACKAGE,
    "vllm-xpu-kernels": XPU_PACKAGE,
    "mate": MATE_PACKAGE,
}
CAUSAL = [name for name, backend in BACKENDS.items() if backend.facts.causal]
every_variant = pytest.mark.parametrize("variant", BACKENDS)


def geometry(variant: str, **rest: Any) -> dict[str, Any]:
    usual = {"num_heads": 2, "num_kv_heads": 2, "head_size": SIZE, "softmax_scale": SIZE**-0.5}
    return usual | {"variant": variant} | rest


def run(
    variant: str,
    tensors: tuple[torch.Tensor, ...],
    record: AttentionMetadata | None = None,
    **rest: Any,
) -> torch.Tensor:
    backend, arguments = BACKENDS[variant], geometry(variant, **rest)
    impl, builder = backend.get_impl_cls()(**arguments), backend.get_builder_cls()(**arguments)
    lengths = (tensors[0].shape[1], tensors[1].shape[1])
    product = build_product(builder, record or AttentionMetadata(), lengths)
    output: torch.Tensor = impl.forward(*tensors, product)
    return output


def tensors(batch: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(batch, n, 2, SIZE, generator=generator) for n in (queries, keys, keys))


# --- rows without a key: the stand-ins write NaN there, as a kernel may that promises nothing


@pytest.mark.parametrize("variant", CAUSAL)
@pytest.mark.parametrize(("queries", "keys"), [(9, 4), (5, 1), (4, 4), (4, 9)])
def test_causal_rows_before_the_first_key_are_zeros(variant: str, queries: int, keys: int) -> None:
    call = tensors(2, queries, keys)
    with fake_kernels("FLASH_ATTN", variant):
        output = run(variant, call, causal=True)
    torch.testing.assert_close(output.double(), reference_attention(*call, causal=True)[0], atol=1e-5, rtol=0)
    assert not output[:, : max(queries - keys, 0)].any()


@pytest.mark.parametrize("variant", ["vllm-xpu-kernels", "mate"])
@pytest.mark.parametrize("window", [(2, 1), (0, 0), (3, -1), (-1, 2)])
def test_window_rows_before_the_first_key_are_zeros(variant: str, window: tuple[int, int]) -> None:
    call = tensors(1, 12, 5)
    with fake_kernels("FLASH_ATTN", variant):
        output = run(variant, call, window=window)
    expected = reference_attention(*call, window=window)[0]
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", CAUSAL)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [((0, 4, 9), (0, 2, 9)), ((0, 3, 8), (0, 0, 6)), ((0, 0, 5), (0, 3, 5)), ((0, 7), (0, 3))],
)
def test_packed_rows_without_a_key_are_zeros(
    variant: str, causal: bool, cu_q: tuple[int, ...], cu_k: tuple[int, ...]
) -> None:
    """The boundaries are on a device that is not looked at: the meta device has no values to look at."""
    builder = BACKENDS[variant].get_builder_cls()(**geometry(variant, causal=causal))
    bounds = {"cu_seqlens_q": torch.tensor(cu_q).int(), "cu_seqlens_k": torch.tensor(cu_k).int()}
    record = AttentionMetadata(**{name: cu.to("meta") for name, cu in bounds.items()})
    assert builder.build(record, (10, 10)).unused_rows.shape == (1, 10, 1, 1)
    dead = [
        rows
        for (q0, q1), (k0, k1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True)
        for rows in _dead_rows(q1 - q0, k1 - k0, causal)
    ]
    found = builder._without_key(Packed(*bounds.values(), 10, 10), 10)
    assert found.flatten().tolist()[: cu_q[-1]] == dead


def _dead_rows(queries: int, keys: int, causal: bool) -> list[bool]:
    """By the reference: a row without a key has a log-sum-exp of -inf."""
    lse = reference_attention(*tensors(1, queries, keys), causal=causal)[1]
    return (lse[0, 0] == float("-inf")).tolist()


@every_variant
def test_an_item_without_any_key_is_zeros(variant: str) -> None:
    call = tensors(3, 5, 6)
    mask = torch.tensor([[1, 0, 1, 1, 0, 0], [0] * 6, [1] * 6], dtype=torch.bool)
    with fake_kernels("FLASH_ATTN", variant):
        output = run(variant, call, AttentionMetadata(attn_mask=mask))
    expected = reference_attention(*call, attn_mask=mask)[0]
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    assert not output[1].any()


@pytest.mark.parametrize("variant", ["aiter", "mate"])
def test_lse_of_rows_without_a_key(variant: str) -> None:
    call = tensors(1, 6, 4)
    with fake_kernels("FLASH_ATTN", variant):
        impl = BACKENDS[variant].get_impl_cls()(**geometry(variant, causal=True))
        builder = BACKENDS[variant].get_builder_cls()(**geometry(variant, causal=True))
        product = builder.build(AttentionMetadata(), (6, 4))
        output, lse = impl.forward_with_lse(*call, product)
    expected, expected_lse = reference_attention(*call, causal=True)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)
    assert torch.equal(lse[:, :, :2], torch.full((1, 2, 2), float("-inf")))


# --- each kernel's own


def test_xpu_packs_a_dense_batch_and_keeps_its_boundaries() -> None:
    call = tensors(2, 5, 7)
    with fake_kernels("FLASH_ATTN", "vllm-xpu-kernels") as log:
        output = run("vllm-xpu-kernels", call)
    assert log.calls == ["flash_attn_varlen_func"]
    torch.testing.assert_close(output.double(), reference_attention(*call)[0], atol=1e-5, rtol=0)
    kept = _kept_bounds(2, 5, torch.device("cpu"))
    assert kept.tolist() == [0, 5, 10] and kept is _kept_bounds(2, 5, torch.device("cpu"))


def test_mate_gets_a_dense_batch_without_boundaries() -> None:
    with fake_kernels("FLASH_ATTN", "mate") as log:
        run("mate", tensors(2, 5, 7))
    assert log.calls == ["flash_attn_varlen_func, dense"]


def test_mindie_masks_are_whole_bool_matrices_made_once() -> None:
    builder = MindieFlashBackend.get_builder_cls()(**geometry("mindiesd"))
    mask = torch.tensor([[True, True, False], [True, False, False]])
    made = builder.build(AttentionMetadata(attn_mask=mask), (4, 3))
    assert made.mask is not None and made.mask.shape == (2, 1, 4, 3) and made.mask.is_contiguous()
    with pytest.raises(MetadataError, match=r"attn_mask.*float32.*TORCH_SDPA"):
        builder.build(AttentionMetadata(attn_mask=torch.zeros(1, 1, 4, 3) - 1), (4, 3))


def test_mindie_refuses_what_its_facts_refuse_at_build_too() -> None:
    for needs in ({"causal": True}, {"window": (2, 2)}):
        builder = MindieFlashBackend.get_builder_cls()(**geometry("mindiesd", **needs))
        with pytest.raises(MetadataError, match=r"causal attention or a window"):
            builder.build(AttentionMetadata(), (4, 4))


# --- missing, broken, of another version


@every_variant
def test_three_faults_read_differently(variant: str) -> None:
    package = PACKAGES[variant]

    def fault() -> str:
        with pytest.raises(BackendImportError) as caught:
            BACKENDS[variant].get_impl_cls()(**geometry(variant))
        assert caught.value.__cause__ is not None or "has no" in str(caught.value)
        return str(caught.value)

    with fake_package(package.module, raises=ModuleNotFoundError("gone", name=package.module.split(".")[0])):
        missing = fault()
    with fake_package(package.module, raises=OSError("libx.so: undefined symbol")):
        broken = fault()
    with fake_package(package.module):
        lacking = fault()
    assert "not installed" in missing or "installed without" in missing
    assert "installed but broken" in broken and "libx.so: undefined symbol" in broken
    assert package.symbols[0] in lacking and "another version" in lacking
    for text in (missing, broken, lacking):
        assert "FLASH_ATTN" in text and variant in text and package.install_command in text


def _takes_nothing(q: Any, k: Any, v: Any) -> None:
    raise AssertionError("never called")


def _takes_no_window(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    softmax_scale: float = 1.0,
    causal: bool = False,
) -> None:
    raise AssertionError("never called")


@every_variant
@pytest.mark.parametrize("function", [_takes_nothing, _takes_no_window])
def test_a_function_of_another_signature_is_found_at_construction(
    variant: str, function: Callable[..., None]
) -> None:
    package: PackageRequirement = PACKAGES[variant]
    with (
        fake_package(package.module, **dict.fromkeys(package.symbols, function)),
        pytest.raises(BackendImportError, match=r"takes no .*(window_size|attn_mask)") as caught,
    ):
        BACKENDS[variant].get_impl_cls()(**geometry(variant))
    assert package.install_command in str(caught.value) and package.distribution in str(caught.value)


def test_a_function_without_a_signature_is_taken_at_its_word() -> None:
    with fake_package("mate", flash_attn_varlen_func=max):  # a builtin: inspect has nothing to say
        impl = MateFlashBackend.get_impl_cls()(**geometry("mate"))
    assert impl.kernel.flash_attn_func is max
