"""Triton's passes over rows against float64: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from omni_attn.ops import triton_rowwise as kernels
from omni_attn.ops.rowwise import rowwise_kernels
from tests.ops.triton_here import DEVICE, INTERPRETED, needs_triton

DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_rounded(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal up to one rounding to the dtype."""
    assert found.dtype == dtype and found.is_contiguous()
    step = 1e-5 if dtype == torch.float32 else 2.0 ** (-7 if INTERPRETED else -8)  # which rounds towards zero
    torch.testing.assert_close(found.double(), wanted, atol=step, rtol=step)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], weight.double(), EPS)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [48, 33])
def test_modulated_norm(dtype: torch.dtype, channels: int) -> None:
    # Tables as a projection leaves them: parts of a row beside one another.
    x, table = noise(2, 5, channels).to(dtype), noise(4, 2, channels, seed=1).to(dtype)
    weight, rows = noise(channels, seed=2).to(dtype), torch.tensor([3, 0, 3, 1, 2], device=DEVICE)
    shift, scale = table.unbind(1)
    wanted = rms_norm(x, weight) * (1 + scale.double()[rows]) + shift.double()[rows]
    assert_rounded(kernels.modulated_rms_norm(x, weight, EPS, shift, scale, rows), wanted, dtype)
    strided = torch.stack([x, x], dim=2).flatten(1, 2)[:, ::2]
    assert not strided.is_contiguous()
    assert_rounded(kernels.modulated_rms_norm(strided, weight, EPS, shift, scale, rows.int()), wanted, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_sum(dtype: torch.dtype) -> None:
    x, y = noise(2, 5, 70).to(dtype), noise(2, 5, 70, seed=1).to(dtype)
    gate, rows = noise(4, 3, 70, seed=2).half()[:, 1], torch.tensor([3, 0, 3, 1, 2], device=DEVICE)
    wanted = x.double() + gate.double()[rows] * y.double()
    kept = x.clone()
    assert_rounded(kernels.gated_sum(x, y, gate, rows), wanted, dtype)
    assert torch.equal(x, kept)


@needs_triton
def test_an_index_outside_of_the_table_is_a_row_of_nan() -> None:
    x, table, weight = noise(1, 3, 40), noise(2, 40), torch.ones(40, device=DEVICE)
    rows = torch.tensor([1, 2, -1], device=DEVICE)
    for found in (
        kernels.modulated_rms_norm(x, weight, EPS, table, table, rows),
        kernels.gated_sum(x, x, table, rows),
    ):
        assert found[0, 0].isfinite().all() and found[0, 1:].isnan().all()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size", "pairs"), [(3, 32, 12), (17, 16, 8), (2, 24, 5)])
def test_turned_norm(dtype: torch.dtype, heads: int, size: int, pairs: int) -> None:
    x, weight = noise(2, 3, heads, size).to(dtype), noise(size, seed=1).to(dtype)
    angle = noise(3, pairs, seed=2).double() * 40
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    normed = rms_norm(x, weight)
    first, second, rest = normed.split([pairs, pairs, size - 2 * pairs], dim=-1)
    wide_cos, wide_sin = cos.double()[:, None], sin.double()[:, None]
    turned = (first * wide_cos - second * wide_sin, second * wide_cos + first * wide_sin, rest)
    assert_rounded(kernels.rotated_rms_norm(x, weight, EPS, cos, sin), torch.cat(turned, dim=-1), dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    x = noise(2, 3, 70).to(dtype)
    value, gate = x.double().chunk(2, dim=-1)
    assert_rounded(kernels.swiglu(x), value * F.silu(gate), dtype)


@needs_triton
def test_nothing_to_do() -> None:
    empty, table, rows = noise(2, 0, 8), noise(1, 8), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert kernels.modulated_rms_norm(empty, table[0], EPS, table, table, rows).shape == (2, 0, 8)
    assert kernels.gated_sum(empty, empty, table, rows).shape == (2, 0, 8)
    assert kernels.swiglu(empty).shape == (2, 0, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gradients_and_tracing_take_torch() -> None:
    x = torch.zeros(2, device="cuda")
    assert rowwise_kernels(x) is not None
    assert rowwise_kernels(x, torch.zeros(2, device="cuda", requires_grad=True)) is None
    assert rowwise_kernels(x.double()) is None


def test_a_cpu_takes_torch() -> None:
    assert rowwise_kernels(torch.zeros(2)) is None
