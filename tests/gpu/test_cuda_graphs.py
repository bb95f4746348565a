"""A captured layer call, replayed on new values, gives what the same call gives eagerly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, prepare_attention
from tests.gpu.machine import FORMS, Call, Kernel, every_kernel, on_gpu
from tests.layer.stands import HEAD_SIZE, assert_close

pytestmark = on_gpu


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def captured(
    layer: Attention, static: Call, record: AttentionMetadata
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The graph of one call and its output, after a warm-up on a stream of its own, as torch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(*static, record)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(*static, record)
    return graph, output


@every_kernel
@pytest.mark.parametrize("form", FORMS)
def test_replays_follow_new_values(kernel: Kernel, form: str) -> None:
    if not kernel.facts.cudagraph:
        pytest.skip(f"{kernel}: its facts say cudagraph=False")
    static, record, expected = kernel.form(form)
    layer = kernel.layer(4, HEAD_SIZE)
    prepare_attention(layer, {"self": record}, {"self": (static[0].shape[1], static[1].shape[1])})
    graph, output = captured(layer, static, record)
    graph.replay()
    kernel.close(output, expected)
    for factor in (-1.0, 0.5):
        before = output.clone()
        for tensor in static:
            tensor.mul_(factor)
        graph.replay()
        replayed = output.clone()
        eager, again = layer(*static, record), layer(*static, record)
        assert not torch.equal(replayed, before), "the replay did not read the new values"
        if torch.equal(eager, again):
            assert torch.equal(replayed, eager)
        else:  # a kernel that sums in another order each time
            assert_close(replayed, eager.double())


@every_kernel
def test_two_graphs_of_one_layer_do_not_share_their_scratch(kernel: Kernel) -> None:
    if not kernel.facts.cudagraph:
        pytest.skip(f"{kernel}: its facts say cudagraph=False")
    layer, record = kernel.layer(4, HEAD_SIZE), AttentionMetadata()
    prepare_attention(layer, {"self": record}, {"self": (256, 256)})
    calls = [kernel.tensors(2, 256, 256, seed=seed) for seed in (1, 2)]
    expected = [layer(*call, record) for call in calls]
    graphs = [captured(layer, call, record) for call in calls]
    for order in (graphs, graphs[::-1]):
        for graph, _ in order:
            graph.replay()
        torch.cuda.synchronize()
        for (_, output), wanted in zip(graphs, expected, strict=True):
            assert_close(output, wanted.double())
