"""Public faults, group G8: torch.compile. B49, on every registered backend.

Stand-in kernels are opaque operators here, so what is traced is the library alone. Waiting for what does not exist
yet: nothing; a backend whose facts say "eager_only" must refuse compile=True, which its conformance class checks.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from omni_attn import Attention, AttentionConfig, AttentionMetadata, prepare_attention
from omni_attn.platforms import OmniPlatform
from tests.faults.opaque_kernels import opaque_kernels
from tests.layer.stands import STANDS, Stand, assert_close, tensors

COMPILED = [stand for stand in STANDS if stand.facts.compile_mode != "eager_only"]
every_compiled_stand = pytest.mark.parametrize("stand", COMPILED, ids=str)
LENGTHS = (6, 9, 12, 6)
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A compiler backend that runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.made.append(graph)
        return graph.forward

    def __len__(self) -> int:
        return len(self.made)


def call_of(stand: Stand, tokens: int) -> list[torch.Tensor]:
    return [x.to(stand.dtype) for x in tensors(2, tokens, tokens)]


def record_of(masked: bool, tokens: int) -> AttentionMetadata:
    """A record with a mask, or a grid only; another mask for each length."""
    if not masked:
        return AttentionMetadata(vsa_dit_seq_shape=(1, 1, tokens))
    return AttentionMetadata(
        attn_mask=torch.arange(tokens)[None] < torch.tensor([[tokens - 2], [tokens - 1]])
    )


def can_mask(stand: Stand) -> bool:
    return "padding" in stand.facts.mask_kinds


@every_compiled_stand
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("form", ["no record", "grid", "mask"])
def test_b49_at_most_one_more_graph_for_other_lengths(stand: Stand, form: str, dynamic: bool | None) -> None:
    graphs = Graphs()
    with opaque_kernels(stand), torch.no_grad():
        layer, eager = stand.layer(4, 8), stand.layer(4, 8)
        compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=dynamic)
        for position, tokens in enumerate(LENGTHS):
            record = None if form == "no record" else record_of(form == "mask" and can_mask(stand), tokens)
            if record is not None:
                prepare_attention(layer, {"self": record}, {"self": (tokens, tokens)})
            output = compiled(*call_of(stand, tokens), record)
            assert_close(output, eager(*call_of(stand, tokens), record).double())
            assert len(graphs) <= min(position + 1, 2)


@every_compiled_stand
def test_b49_steps_do_not_recompile(stand: Stand) -> None:
    """A new record, another sigma, other mask values: the same graph, with the numbers of each step."""
    graphs = Graphs()
    with opaque_kernels(stand), torch.no_grad():
        layer, eager = stand.layer(4, 8), stand.layer(4, 8)
        compiled = torch.compile(layer, fullgraph=True, backend=graphs)
        for step in range(4):
            fields: dict[str, Any] = {"step": step, "num_steps": 4, "sigma": 1 - step / 4}
            if can_mask(stand):
                fields["attn_mask"] = torch.arange(8)[None] < torch.tensor([[4 + step], [7 - step]])
            record = AttentionMetadata(**fields)
            prepare_attention(layer, {"self": record}, {"self": (8, 8)})
            assert_close(
                compiled(*call_of(stand, 8), record), eager(*call_of(stand, 8), record.at_step(step)).double()
            )
        later = record.at_step(5, sigma=0.0)
        prepare_attention(layer, {"self": later}, {"self": (8, 8)})
        compiled(*call_of(stand, 8), later)
    assert len(graphs) == 1


class Block(nn.Module):
    """A block with one attention layer."""

    def __init__(self, stand: Stand, role: str, index: int) -> None:
        super().__init__()
        self.attn: Attention = stand.layer(4, 8, role=role, prefix=f"blocks.{index}.attn")

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, record: AttentionMetadata | None
    ) -> torch.Tensor:
        return self.attn(query + 1, key, value, record) * 2


@every_compiled_stand
@pytest.mark.parametrize("form", ["no record", "grid", "mask"])
@pytest.mark.parametrize("warmed", [False, True], ids=["fresh", "some ran before"])
def test_b49_equal_blocks_share_one_frame(stand: Stand, form: str, warmed: bool) -> None:
    """Ten blocks, more than torch recompiles one frame for; one more graph for all other lengths together."""
    graphs, role = Graphs(), f"self.{next(_numbers)}"  # a role that no earlier test left in a cache
    with opaque_kernels(stand), torch.no_grad():
        model = nn.ModuleList(Block(stand, role, index) for index in range(10))
        if warmed:
            for block in model[::3]:
                block(*call_of(stand, 5), None)
        compiled = [torch.compile(block, fullgraph=True, backend=graphs) for block in model]
        for limit, tokens in ((1, 8), (2, 11), (2, 14)):
            record = None if form == "no record" else record_of(form == "mask" and can_mask(stand), tokens)
            if record is not None:
                prepare_attention(model, {role: record}, {role: (tokens, tokens)})
            outputs = [block(*call_of(stand, tokens), record) for block in compiled]
            assert len(graphs) <= limit
            expected = Block(stand, role, 0)(*call_of(stand, tokens), record)
            for output in outputs:
                assert_close(output, expected.double())


@every_compiled_stand
@pytest.mark.parametrize("masked", [False, True])
def test_b49_traced_shapes_and_strides_are_the_real_ones(stand: Stand, masked: bool) -> None:
    """Also from strided inputs, as slices of a fused projection are."""
    graphs = Graphs()
    call = torch.stack(call_of(stand, 6), dim=2).unbind(2)
    record = record_of(masked and can_mask(stand), 6)
    with opaque_kernels(stand), torch.no_grad():
        layer = stand.layer(4, 8)
        prepare_attention(layer, {"self": record}, {"self": (6, 6)})
        output = torch.compile(layer, fullgraph=True, backend=graphs)(*call, record)
        eager = layer(*call, record)
    (graph,) = graphs.made
    (answer,) = graph.graph.output_node().args[0]
    traced = answer.meta["example_value"]
    for real in (output, eager):
        assert traced.shape == real.shape == (2, 6, 4, 8)
        assert traced.stride() == real.stride() and traced.dtype == real.dtype
    assert_close(output, eager.double())


@every_compiled_stand
def test_b49_a_record_that_was_not_prepared(stand: Stand) -> None:
    with opaque_kernels(stand):
        compiled = torch.compile(stand.layer(4, 8), fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="prepare_attention"):
            compiled(*call_of(stand, 6), AttentionMetadata())


@every_compiled_stand
def test_b49_a_layer_compiled_in_place_after_it_ran(stand: Stand) -> None:
    graphs = Graphs()
    with opaque_kernels(stand), torch.no_grad():
        layer = stand.layer(4, 8)
        expected = layer(*call_of(stand, 6))
        layer.compile(fullgraph=True, backend=graphs)
        assert_close(layer(*call_of(stand, 6)), expected.double())
    assert len(graphs) == 1


@pytest.mark.parametrize("stand", [s for s in COMPILED if "float32" not in s.facts.dtypes], ids=str)
def test_b49_a_dtype_that_the_kernel_lacks_does_not_reach_it_in_compiled_code(stand: Stand) -> None:
    with opaque_kernels(stand) as log, torch.no_grad():
        compiled = torch.compile(stand.layer(4, 8), fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="float32"):
            compiled(*tensors(2, 6, 6))
    assert not log.calls


@every_compiled_stand
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_b49_forward_asks_nobody(stand: Stand, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, log line, package, capability or selection is looked at once a layer is built."""
    asked: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            asked.append(name)
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    records = [None, record_of(can_mask(stand), 6), AttentionMetadata(step=1)]
    with opaque_kernels(stand), torch.no_grad():
        layer = stand.layer(4, 8, dtype=stand.dtype)
        run = layer if mode == "eager" else torch.compile(layer, fullgraph=True, backend="eager")
        for record in records:
            if record is not None:
                prepare_attention(layer, {"self": record}, {"self": (6, 6)})
            if mode == "compiled":  # what tracing itself looks at is the compiler's business
                run(*call_of(stand, 6), record)
        watch(type(os.environ), "__getitem__")
        watch(type(os.environ), "__contains__")
        watch(logging.Logger, "handle")
        watch(torch.cuda, "get_device_capability")
        watch(torch.cuda, "get_device_properties")
        watch(importlib.util, "find_spec")
        watch(importlib.metadata, "version")
        watch(AttentionConfig, "resolve")
        watch(OmniPlatform, "evaluate")
        for record in records:
            run(*call_of(stand, 6), record)
        monkeypatch.undo()
    assert asked == []
