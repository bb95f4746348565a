"""FLASH_ATTN: what each module's functions are told, and what is said when a module cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_attn import AttentionMetadata
from omni_attn.backends.flash_attn import FlashAttentionBackend
from omni_attn.errors import BackendImportError
from omni_attn.ops.reference import reference_attention
from omni_attn.products import build_product
from omni_attn.testing import fake_kernels, fake_package

GEOMETRY: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "head_size": 16, "softmax_scale": 0.25}
MODULES = {"fa2": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


def recorder(told: list[dict[str, Any]]) -> Callable[..., torch.Tensor]:
    def kernel(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        told.append(options)
        return torch.zeros_like(tensors[0])

    return kernel


@pytest.mark.parametrize("variant", MODULES)
@pytest.mark.parametrize(
    ("needs", "options"),
    [
        ({}, {}),
        ({"softmax_scale": 0.3}, {"softmax_scale": 0.3}),
        ({"causal": True}, {"causal": True}),
        ({"window": (3, 5)}, {"window_size": (3, 5)}),
        ({"window": (3, -1)}, {"window_size": (3, None)}),
        ({"window": (-1, 0), "causal": True}, {"causal": True, "window_size": (None, 0)}),
        ({"window": (-1, -1)}, {}),
    ],
    ids=str,
)
def test_a_dense_call_says_what_differs_from_the_defaults(
    variant: str, needs: dict[str, Any], options: dict[str, Any]
) -> None:
    """A side of a window without end is None for version 4, and -1 for those before."""
    told: list[dict[str, Any]] = []
    functions = {name: recorder(told) for name in ("flash_attn_func", "flash_attn_varlen_func")}
    query, geometry = torch.zeros(1, 8, 4, 16), GEOMETRY | needs | {"variant": variant}
    with fake_package(MODULES[variant], **functions):
        impl = FlashAttentionBackend.get_impl_cls()(**geometry)
        builder = FlashAttentionBackend.get_builder_cls()(**geometry)
        impl.forward(query, query, query, build_product(builder, AttentionMetadata(), (8, 8)))
        boundaries = torch.tensor([0, 8], dtype=torch.int32)
        lengths = (boundaries, boundaries, 8, 8)
        impl.kernel.varlen(*[query[0]] * 3, *lengths, impl.softmax_scale, impl.causal, impl._window)
    if variant != "fa4" and "window_size" in options:
        left, right = (-1 if side is None else side for side in options["window_size"])
        options = options | {"window_size": (left, right)}
    assert told[0] == options  # 0.25 is what a kernel takes for 16 channels when it is told nothing
    assert {name: told[1][name] for name in told[0]} == told[0]


@pytest.mark.parametrize("variant", MODULES)
def test_rows_without_a_key_have_one_lse_whatever_the_kernel_writes(variant: str) -> None:
    query, key, value = torch.randn(3, 1, 5, 4, 16, generator=torch.Generator().manual_seed(0))
    key, value = key[:, :3], value[:, :3]
    with fake_kernels("FLASH_ATTN", variant):
        impl = FlashAttentionBackend.get_impl_cls()(**GEOMETRY, variant=variant, causal=True)
        builder = FlashAttentionBackend.get_builder_cls()(**GEOMETRY, variant=variant, causal=True)
        product = build_product(builder, AttentionMetadata(), (5, 3))
        output, lse = impl.forward_with_lse(query, key, value, product)
    expected, expected_lse = reference_attention(query, key, value, softmax_scale=0.25, causal=True)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("fault", "quoted"),
    [
        ({"raises": ModuleNotFoundError("...", name="flash_attn.cute")}, "without module flash_attn.cute"),
        (
            {"raises": ModuleNotFoundError("No module named 'cutlass'", name="cutlass")},
            "No module named 'cutlass'",
        ),
        ({"raises": OSError("libcuda.so.1: cannot open")}, "broken: OSError: libcuda.so.1: cannot open"),
        ({"flash_attn_func": print}, "has no flash_attn_varlen_func"),
    ],
    ids=["version 2 alone", "its compiler is missing", "no driver", "an early build"],
)
def test_a_missing_version_4_is_told_from_a_broken_one(fault: dict[str, Any], quoted: str) -> None:
    with fake_package("flash_attn.cute", **fault), pytest.raises(BackendImportError) as caught:
        FlashAttentionBackend.get_impl_cls()(**GEOMETRY, variant="fa4")
    text = str(caught.value)
    assert "FLASH_ATTN (fa4)" in text and quoted in text and '`pip install "omni-attn[fa4]"`' in text
    assert "not installed" not in text


def test_no_flash_attention_at_all_reads_differently() -> None:
    with pytest.raises(
        BackendImportError, match=r"flash_attn.cute is not installed; install it: .*omni-attn\[fa4\]"
    ):
        FlashAttentionBackend.get_impl_cls()(**GEOMETRY, variant="fa4")


def test_a_broken_module_is_not_laid_to_one_of_those_that_ship_it() -> None:
    broken = OSError("libtorch.so: undefined symbol")
    with fake_package("flash_attn_interface", raises=broken), pytest.raises(BackendImportError) as caught:
        FlashAttentionBackend.get_impl_cls()(**GEOMETRY, variant="fa3")
    text = str(caught.value)
    assert "#subdirectory=hopper` or `pip install tokenspeed-fa3`" in text and "fa3-fwd" not in text
