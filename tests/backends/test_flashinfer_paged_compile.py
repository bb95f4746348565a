"""FLASHINFER_ATTN over pages under torch.compile: compiled code finds the plan of each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from omni_attn.testing import fake_kernels
from tests.backends.test_paged_peers import harness


@pytest.mark.parametrize("variant", ["fa3", "fa2"])
def test_another_plan_is_no_other_compilation(variant: str) -> None:
    """Numbers of tokens become dynamic with the second step, and all later ones share the code."""
    compiled = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    counts, steps, impl = [], list[Any](), None
    with fake_kernels("FLASHINFER_ATTN", variant):
        tested = harness("FLASHINFER_ATTN", variant)
        for lengths in (((3, 20), (2, 40)), ((5, 30), (4, 9)), ((7, 33), (4, 60))):
            scene = tested.scene(lengths, causal=True)
            own, builder, cache = tested.ready(scene)
            impl = impl or own
            run = torch.compile(impl.forward, backend=compiled, fullgraph=True)
            steps.append((scene, cache, builder.build(scene.common)))
            for made, kept, metadata in steps:  # those before as well: their plans are still held
                output = torch.zeros_like(made.query)
                run(made.query, None, None, kept, metadata, output)
                tested.close(output, made.expected(causal=True))
            counts.append(compiled.frame_count)
    assert counts == [1, 2, 2]
