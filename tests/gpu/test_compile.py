"""torch.compile(fullgraph=True) on real kernels: eager's numbers, and one frame for equal blocks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from omni_attn import AttentionMetadata, prepare_attention
from tests.gpu.machine import FORMS, ON_CPU, Call, Kernel, every_kernel, on_gpu
from tests.layer.stands import HEAD_SIZE, assert_close

BACKENDS = ("aot_eager", "inductor")
BLOCKS = 10  # more than torch recompiles one frame for


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counted:
    """One of torch's compiler backends, with the number of graphs that it was given."""

    def __init__(self, backend: str) -> None:
        self.compile, self.graphs = torch._dynamo.lookup_backend(backend), 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.graphs += 1
        return self.compile(graph, inputs)


class Block(nn.Module):
    """A block with one attention layer."""

    def __init__(self, kernel: Kernel, index: int) -> None:
        super().__init__()
        self.attn = kernel.layer(4, HEAD_SIZE, prefix=f"blocks.{index}.attn")

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, record: AttentionMetadata
    ) -> torch.Tensor:
        output: torch.Tensor = self.attn(query * 2, key, value, record) + query
        return output


def prepared(model: nn.Module, call: Call, record: AttentionMetadata) -> None:
    prepare_attention(model, {"self": record}, {"self": (call[0].shape[1], call[1].shape[1])})


def equals_eager(kernel: Kernel, form: str, backend: str) -> None:
    """A compiled layer on one form of call, twice."""
    call, record, expected = kernel.form(form)
    layer = kernel.layer(4, HEAD_SIZE)
    prepared(layer, call, record)
    eager = layer(*call, record)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for _ in range(2):
        output = compiled(*call, record)
        assert output.is_contiguous() and output.dtype == call[0].dtype
        kernel.close(output, expected)
        assert_close(output, eager.double())


def share_one_frame(kernel: Kernel, form: str, backend: str) -> None:
    """Equal blocks, compiled one by one, are one graph; so is the next step."""
    call, record, _ = kernel.form(form)
    model, counted = nn.ModuleList(Block(kernel, index) for index in range(BLOCKS)), Counted(backend)
    blocks = [torch.compile(block, fullgraph=True, backend=counted) for block in model]
    for step in range(2):
        later = record.at_step(step, num_steps=2)
        prepared(model, call, later)
        expected = model[0](*call, later).double()
        for block in blocks:
            assert_close(block(*call, later), expected, 4e-2)  # the sum is rounded once more
    assert counted.graphs == 1


@pytest.mark.parametrize("form", FORMS)
def test_the_recipes_hold_on_the_cpu(form: str) -> None:
    with torch.no_grad():
        equals_eager(ON_CPU, form, "aot_eager")
        share_one_frame(ON_CPU, form, "aot_eager")


def able(kernel: Kernel, backend: str) -> None:
    if kernel.facts.compile_mode == "eager_only":
        pytest.skip(f"{kernel}: its facts say eager_only")
    if backend == "inductor" and not any(map(shutil.which, ("gcc", "clang", "cc"))):
        pytest.skip("inductor needs a C compiler, found none on this machine")


class TestOnGPU:
    pytestmark = on_gpu

    @every_kernel
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("form", FORMS)
    def test_a_compiled_layer_equals_eager(self, kernel: Kernel, form: str, backend: str) -> None:
        able(kernel, backend)
        with torch.no_grad():
            equals_eager(kernel, form, backend)

    @every_kernel
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("form", ["dense", "padding"])
    def test_equal_blocks_share_one_frame(self, kernel: Kernel, form: str, backend: str) -> None:
        able(kernel, backend)
        with torch.no_grad():
            share_one_frame(kernel, form, backend)
