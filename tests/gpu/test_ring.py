"""Real kernels in a ring whose ranks are threads on one device: their parts are merged, and gradients come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_attn import AttentionMetadata
from omni_attn.ops.reference import reference_attention
from omni_attn.parallel import Parallel
from omni_attn.testing import fake_ranks
from tests.gpu.machine import FORMS, ON_CPU, Call, Kernel, every_kernel, on_gpu, reference
from tests.layer.stands import HEAD_SIZE, outcome_of

RINGS: list[dict[str, Any]] = [{"ring_degree": 3}, {"ulysses_degree": 2, "ring_degree": 2}]
every_ring = pytest.mark.parametrize("config", RINGS, ids=str)


def in_a_ring(
    kernel: Kernel, config: dict[str, Any], call: Call, record: AttentionMetadata, **needs: Any
) -> torch.Tensor:
    """What the ranks give, put together."""

    def work(parallel: Parallel) -> torch.Tensor:
        layer = kernel.layer(call[0].shape[2], HEAD_SIZE, num_kv_heads=call[1].shape[2], **needs)
        return layer(*map(parallel.split, call), record)

    return torch.cat(fake_ranks(config, work), dim=1)


def requires_ring(kernel: Kernel, **needs: Any) -> None:
    for mode in ("ring", "ulysses_ring"):
        if reasons := kernel.why_not(sequence_parallel=mode, **needs):
            pytest.skip(f"{kernel}: {'; '.join(reasons)}")


def equals_the_reference(kernel: Kernel, config: dict[str, Any], form: str) -> None:
    """For calls that have a log-sum-exp; the rest is refused while preparing, by name."""
    requires_ring(kernel)
    call, record, expected = kernel.form(form)
    output = outcome_of(lambda: in_a_ring(kernel, config, call, record))
    if isinstance(output, str):
        assert form != "dense" and "log-sum-exp" in output and kernel.name in output, output
        return
    kernel.close(output, expected)


def causal_equals_the_reference(kernel: Kernel, config: dict[str, Any]) -> None:
    """Each shard's own triangle, and all of the earlier shards; key-value heads are shared."""
    requires_ring(kernel, causal=True, num_kv_heads=2)
    call = kernel.tensors(2, 509, 509, kv_heads=2)
    output = in_a_ring(kernel, config, call, AttentionMetadata(), causal=True)
    kernel.close(output, reference_attention(*call, causal=True)[0])


def gradients_equal_the_reference(kernel: Kernel, config: dict[str, Any]) -> None:
    """As well as those of one rank, whose bfloat16 kernel has an error of its own."""
    requires_ring(kernel, requires_grad=True)
    call, record = kernel.tensors(1, 500, 500), AttentionMetadata()
    weights = torch.linspace(-1, 1, 500, device=kernel.device)[:, None, None]

    def gradients(run: Callable[[Call], torch.Tensor], dtype: torch.dtype) -> Call:
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in call]
        return list(torch.autograd.grad((run(leaves) * weights).sum(), leaves))

    exact = gradients(lambda leaves: reference(leaves, record), torch.float64)
    alone = gradients(lambda leaves: kernel.layer(4, HEAD_SIZE, requires_grad=True)(*leaves), kernel.dtype)
    together = gradients(
        lambda leaves: in_a_ring(kernel, config, leaves, record, requires_grad=True), kernel.dtype
    )
    for rank, ring, double in zip(alone, together, exact, strict=True):
        errors = [float((own.double() - double).norm() / double.norm()) for own in (rank, ring)]
        assert errors[1] <= 1.5 * errors[0] + 5e-3, errors


class TestOnGPU:
    pytestmark = on_gpu

    @every_ring
    @every_kernel
    @pytest.mark.parametrize("form", FORMS)
    def test_forms(self, kernel: Kernel, config: dict[str, Any], form: str) -> None:
        equals_the_reference(kernel, config, form)

    @every_ring
    @every_kernel
    def test_causal(self, kernel: Kernel, config: dict[str, Any]) -> None:
        causal_equals_the_reference(kernel, config)

    @every_ring
    @every_kernel
    def test_gradients(self, kernel: Kernel, config: dict[str, Any]) -> None:
        gradients_equal_the_reference(kernel, config)


@every_ring
@pytest.mark.parametrize("form", FORMS)
def test_forms_on_the_cpu(config: dict[str, Any], form: str) -> None:
    equals_the_reference(ON_CPU, config, form)


@every_ring
def test_causal_and_gradients_on_the_cpu(config: dict[str, Any]) -> None:
    causal_equals_the_reference(ON_CPU, config)
    gradients_equal_the_reference(ON_CPU, config)
