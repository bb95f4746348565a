"""Triton as a package: what kernels written in it need."""

from __future__ import annotations

from dataclasses import replace

from omni_attn.facts import PackageRequirement

TRITON = PackageRequirement(
    distribution="triton", module="triton", symbols=("jit",), install="pip install triton"
)
#: The distributions that torch's wheels bring Triton in, by platform and release.
TRITON_PACKAGES = tuple(
    replace(TRITON, distribution=name)
    for name in (
        *("triton", "triton-rocm", "triton-xpu", "triton-windows"),
        *("pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu"),
    )
)
