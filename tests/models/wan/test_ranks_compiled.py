"""torch.compile of a model among ranks, traced with process groups of torch's own that exchange nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.testing

from omni_attn.parallel import Parallel, use_parallel
from omni_attn.parallel.dispatch import STRATEGIES
from tests.models.wan.ranks import MODES
from tests.models.wan.tiny_models import build_inputs, build_model
from tests.parallel.traced import traced_rank


@pytest.fixture
def parallel(request: pytest.FixtureRequest) -> Iterator[Parallel]:
    """The first rank of a mode."""
    with traced_rank(MODES[request.param]) as first:
        yield first


@pytest.mark.parametrize("parallel", STRATEGIES, indirect=True)
def test_equal_blocks_compile_into_one_frame_and_a_second_length_into_one_more(parallel: Parallel) -> None:
    with use_parallel(parallel):
        model = build_model("t2v")
    inputs = build_inputs("t2v")
    longer = (torch.cat([inputs[0], inputs[0]], dim=2), *inputs[1:])
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    with torch.no_grad():
        assert model(*inputs).shape == (2, 4, 3, 4, 6)
        assert counter.frame_count == 1
        assert model(*longer).shape == (2, 4, 6, 4, 6)
        model(*inputs)
    assert counter.frame_count == 2
