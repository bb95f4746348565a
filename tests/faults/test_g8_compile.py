"""Public faults, group G8: torch.compile. B49, on every registered backend.

Stand-in kernels are opaque operators here, so what is traced is the library alone.
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
from tests.layer.stands import COMPILED, HEAD_SIZE, STANDS, Stand, assert_close, refusal_of, tensors

every_compiled_stand = pytest.mark.parametrize("stand", COMPILED, ids=str)
#: Which of a backend's shortest lengths are used. None equals another dimension, which a compiler could take it for.
LENGTHS = (3, 5, 6, 3)
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


def can_mask(stand: Stand) -> bool:
    return "padding" in stand.facts.mask_kinds


def forms_of(stand: Stand) -> tuple[str, ...]:
    """What a call may come with, the one that says most at the end."""
    if stand.facts.needs_video_grid:  # which a call without a record does not state
        return ("grid",)
    return ("no record", "grid", "mask") if can_mask(stand) else ("no record", "grid")


def record_of(form: str, tokens: int) -> AttentionMetadata | None:
    """A record with a grid or a mask, another one for each length."""
    if form == "mask":
        kept = torch.tensor([[tokens - 2], [tokens - 1]])
        return AttentionMetadata(attn_mask=torch.arange(tokens)[None] < kept)
    if form == "grid":  # all its tiles on the kernel, and not on a route around it
        return AttentionMetadata(vsa_dit_seq_shape=(1, 1, tokens), preserve_vsa_all_blocks=True)
    return None


@pytest.mark.parametrize(
    ("dynamic", "form", "stand"),
    [(None, form, stand) for stand in COMPILED for form in forms_of(stand)]
    + [(True, forms_of(stand)[-1], stand) for stand in COMPILED],
    ids=str,
)
def test_b49_at_most_one_more_graph_for_other_lengths(stand: Stand, form: str, dynamic: bool | None) -> None:
    graphs = Graphs()
    with opaque_kernels(stand), torch.no_grad():
        layer, eager = stand.layer(4, HEAD_SIZE), stand.layer(4, HEAD_SIZE)
        compiled = torch.compile(layer, fullgraph=True, backend=graphs, dynamic=dynamic)
        for position, tokens in enumerate(map(stand.tokens, LENGTHS)):
            record = record_of(form, tokens)
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
        layer, eager = stand.layer(4, HEAD_SIZE), stand.layer(4, HEAD_SIZE)
        compiled = torch.compile(layer, fullgraph=True, backend=graphs)
        tokens = stand.tokens(7)
        for step in range(4):
            fields: dict[str, Any] = {"step": step, "num_steps": 4, "sigma": 1 - step / 4}
            if can_mask(stand):
                fields["attn_mask"] = torch.arange(tokens)[None] < torch.tensor([[4 + step], [7 - step]])
            record = AttentionMetadata(**fields)
            prepare_attention(layer, {"self": record}, {"self": (tokens, tokens)})
            output = compiled(*call_of(stand, tokens), record)
            assert_close(output, eager(*call_of(stand, tokens), record.at_step(step)).double())
        later = record.at_step(5, sigma=0.0)
        prepare_attention(layer, {"self": later}, {"self": (tokens, tokens)})
        compiled(*call_of(stand, tokens), later)
    assert len(graphs) == 1


class Block(nn.Module):
    """A block with one attention layer."""

    def __init__(self, stand: Stand, role: str, index: int) -> None:
        super().__init__()
        self.attn: Attention = stand.layer(4, HEAD_SIZE, role=role, prefix=f"blocks.{index}.attn")

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, record: AttentionMetadata | None
    ) -> torch.Tensor:
        return self.attn(query + 1, key, value, record) * 2


@pytest.mark.parametrize(
    ("state", "form", "stand"),
    [("some ran before", form, stand) for stand in COMPILED for form in forms_of(stand)]
    + [("fresh", forms_of(stand)[-1], stand) for stand in COMPILED],
    ids=str,
)
def test_b49_equal_blocks_share_one_frame(stand: Stand, form: str, state: str) -> None:
    """Ten blocks, more than torch recompiles one frame for; one more graph for all other lengths together."""
    graphs, role = Graphs(), f"self.{next(_numbers)}"  # a role that no earlier test left in a cache
    with opaque_kernels(stand), torch.no_grad():
        model = nn.ModuleList(Block(stand, role, index) for index in range(10))
        if state == "some ran before":
            for block in model[::3]:
                block(*call_of(stand, stand.tokens(2)), None)
        compiled = [torch.compile(block, fullgraph=True, backend=graphs) for block in model]
        for limit, tokens in zip((1, 2, 2), map(stand.tokens, LENGTHS), strict=False):
            record = record_of(form, tokens)
            if record is not None:
                prepare_attention(model, {role: record}, {role: (tokens, tokens)})
            outputs = [block(*call_of(stand, tokens), record) for block in compiled]
            assert len(graphs) <= limit
            expected = Block(stand, role, 0)(*call_of(stand, tokens), record)
            for output in outputs:
                assert_close(output, expected.double())


@pytest.mark.parametrize(
    ("form", "stand"),
    [(form, stand) for stand in COMPILED for form in forms_of(stand) if form != "no record"],
    ids=str,
)
def test_b49_traced_shapes_and_strides_are_the_real_ones(stand: Stand, form: str) -> None:
    """Also from strided inputs, as slices of a fused projection are."""
    graphs, tokens = Graphs(), stand.tokens(3)
    call = torch.stack(call_of(stand, tokens), dim=2).unbind(2)
    record = record_of(form, tokens)
    with opaque_kernels(stand), torch.no_grad():
        layer = stand.layer(4, HEAD_SIZE)
        prepare_attention(layer, {"self": record}, {"self": (tokens, tokens)})
        output = torch.compile(layer, fullgraph=True, backend=graphs)(*call, record)
        eager = layer(*call, record)
    (graph,) = graphs.made
    (answer,) = graph.graph.output_node().args[0]
    traced = answer.meta["example_value"]
    for real in (output, eager):
        assert traced.shape == real.shape == (2, tokens, 4, HEAD_SIZE)
        assert traced.stride() == real.stride() and traced.dtype == real.dtype
    assert_close(output, eager.double())


@every_compiled_stand
def test_b49_a_record_that_was_not_prepared(stand: Stand) -> None:
    tokens = stand.tokens(3)
    with opaque_kernels(stand):
        compiled = torch.compile(stand.layer(4, HEAD_SIZE), fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="prepare_attention"):
            compiled(*call_of(stand, tokens), AttentionMetadata())


@every_compiled_stand
def test_b49_a_layer_compiled_in_place_after_it_ran(stand: Stand) -> None:
    graphs, tokens = Graphs(), stand.tokens(3)
    with opaque_kernels(stand), torch.no_grad():
        layer = stand.layer(4, HEAD_SIZE)
        expected = layer(*call_of(stand, tokens))
        layer.compile(fullgraph=True, backend=graphs)
        assert_close(layer(*call_of(stand, tokens)), expected.double())
    assert len(graphs) == 1


@pytest.mark.parametrize("stand", [s for s in COMPILED if "float32" not in s.facts.dtypes], ids=str)
def test_b49_a_dtype_that_the_kernel_lacks_does_not_reach_it_in_compiled_code(stand: Stand) -> None:
    with opaque_kernels(stand) as log, torch.no_grad():
        compiled = torch.compile(stand.layer(4, HEAD_SIZE), fullgraph=True, backend="eager")
        with pytest.raises(Exception, match="float32"):
            compiled(*tensors(2, 6, 6))
    assert not log.calls


@pytest.mark.parametrize("stand", [stand for stand in STANDS if stand not in COMPILED], ids=str)
def test_b49_what_cannot_be_compiled_says_so_when_it_is_chosen(stand: Stand) -> None:
    with stand.kernels():
        text = refusal_of(lambda: stand.layer(4, HEAD_SIZE, compile=True))
    assert stand.name in text and "torch.compile" in text


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

    tokens = stand.tokens(3)
    records = [None, record_of(forms_of(stand)[-1], tokens), AttentionMetadata(step=1)]
    with opaque_kernels(stand), torch.no_grad():
        layer = stand.layer(4, HEAD_SIZE, dtype=stand.dtype)
        run = layer if mode == "eager" else torch.compile(layer, fullgraph=True, backend="eager")
        for record in records:
            if record is not None:
                prepare_attention(layer, {"self": record}, {"self": (tokens, tokens)})
            if mode == "compiled":  # what tracing itself looks at is the compiler's business
                run(*call_of(stand, tokens), record)
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
            run(*call_of(stand, tokens), record)
        monkeypatch.undo()
    assert asked == []
