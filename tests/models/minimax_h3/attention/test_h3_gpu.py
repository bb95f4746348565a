"""MiniMax-H3's attention on this machine's GPU: conformance, every executor, graphs, gradients, no host waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omni_attn import Attention, PackedPadding, prepare_attention
from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.fastvideo_vsa_facts import VSA_VARIANTS
from omni_attn.errors import BackendRejectedError
from omni_attn.ops.block_sparse.prefix_selector import prefix_dense_topk
from omni_attn.platforms import current_omni_platform
from tests.gpu.machine import on_gpu
from tests.models.minimax_h3.attention.h3_layers import MODES, Sequence3D, h3_layer, random_call
from tests.models.minimax_h3.attention.test_h3_conformance import (
    H3ExecutorBackend,
)
from tests.models.minimax_h3.attention.test_h3_conformance import TestDenseRoute as DenseRoute

pytestmark = on_gpu

#: 6 chunks of 64, three of them short, and 2 x 5 x 6 tiles of 4 x 4 x 4, clipped along each axis.
JOINT = Sequence3D((70, 5, 130), (7, 18, 22))
TILES = [(4, 4, 4), (4, 8, 8)]
VARIANTS = [variant.name for variant in VSA_VARIANTS]
ROUTES = pytest.mark.parametrize("topk", [3, 999], ids=["sparse", "dense"])
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def call_of(dtype: torch.dtype = torch.bfloat16, padding: int = 0) -> Call:
    return random_call(
        JOINT.tokens + padding, batch=1, heads=4, kv_heads=2, size=128, dtype=dtype, device="cuda"
    )


def layer_of(variant: str, mode: str = "exempt", **options: Any) -> Attention:
    try:
        return h3_layer(
            "cuda",
            impl=MODES[mode],
            variant=variant,
            heads=4,
            size=128,
            needs={"num_kv_heads": 2},
            **options,
        )
    except BackendRejectedError as error:
        pytest.skip(str(error).splitlines()[0])


class TestDenseRouteOnGPU(DenseRoute):
    variant = "triton"
    device = "cuda"
    dtype = torch.bfloat16
    head_size = 128
    tolerance = 2e-2

    def setup_method(self) -> None:
        self.machine = current_omni_platform("cuda").device
        if reasons := self.reasons(dtype="bfloat16"):
            pytest.skip("; ".join(reasons))
        super().setup_method()

    def kernels(self) -> Any:
        """The real ones."""
        return super(DenseRoute, self).kernels()


class TestTritonOnGPU(TestDenseRouteOnGPU):
    def get_backend(self) -> type[AttentionBackend]:
        return H3ExecutorBackend


class TestFlash3OnGPU(TestTritonOnGPU):
    variant = "fa3"


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_executor_equals_float64(variant: str, mode: str, tile: tuple[int, int, int]) -> None:
    """Of the same definition: what the executor itself selects, by torch's executor."""
    call = call_of(padding=51)
    for x in call:
        x[:, JOINT.tokens :] = float("nan")
    layer = layer_of(variant, mode, topk=3, tile_size=tile)
    record = JOINT.record(call[3])
    output = layer(*call[:3], record)
    exact = layer_of("torch", mode, topk=3, tile_size=tile)
    wide = [x.double() for x in call]
    expected = exact(*wide[:3], JOINT.record(wide[3]))
    assert not output[:, JOINT.tokens :].any() and output.isfinite().all() and output.is_contiguous()
    # Means of bfloat16 tensors may rank near ties otherwise than float64 does: such rows are few.
    wrong = (output.double() - expected).abs().amax(-1) > 3e-2
    assert wrong.double().mean().item() < 0.02
    before = JOINT.before
    assert (output[:, :before].double() - expected[:, :before]).abs().max().item() < 2e-2


@pytest.mark.parametrize("mode", MODES)
def test_float32_on_triton(mode: str) -> None:
    call = call_of(torch.float32)
    options = {"topk": 3, "tile_size": (4, 4, 4)}
    output = layer_of("triton", mode, **options)(*call[:3], JOINT.record(call[3]))
    wide = [x.double() for x in call]
    expected = layer_of("torch", mode, **options)(*wide[:3], JOINT.record(wide[3]))
    assert (output.double() - expected).abs().max().item() < 1e-4


def test_the_selection_equals_that_on_the_cpu() -> None:
    """At the size of a clip of five seconds; with ties, and with rows that cannot be ranked."""
    scores = (torch.randn(1, 3, 672, 672, generator=torch.Generator().manual_seed(0)) * 64).round()
    scores[0, 0, 300, 40], scores[0, 1, 500, 3], scores[0, 2, 20, 600] = (
        float("nan"),
        float("inf"),
        float("-inf"),
    )
    for rows in (scores, scores[:, :, 12:]):
        for topk in (1, 66, 659, 660):
            for compete in (False, True):
                found = prefix_dense_topk(rows.cuda(), 12, topk, compete=compete)
                expected = prefix_dense_topk(rows, 12, topk, compete=compete)
                assert torch.equal(found.counts.cpu(), expected.counts)
                assert torch.equal(found.indices.cpu(), expected.indices)


def runs(layer: Attention, call: Call, **fields: Any) -> Callable[[], torch.Tensor]:
    record = JOINT.record(**fields)
    prepare_attention(layer, {"self": record}, {"self": (call[0].shape[1],) * 2})
    gated = record.with_layer_inputs(gate_compress=call[3])
    return lambda: layer(*call[:3], gated)


@ROUTES
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_host_does_not_wait(variant: str, topk: int) -> None:
    with torch.no_grad():
        padding = {"packed_padding": PackedPadding(JOINT.tokens, JOINT.tokens)}
        run = runs(layer_of(variant, topk=topk), call_of(padding=51), **padding)
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@ROUTES
@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_follow_new_values(variant: str, topk: int) -> None:
    """A captured call, gate included: another selection with each replay."""
    with torch.no_grad():
        call = call_of()
        run = runs(layer_of(variant, topk=topk), call)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
        for seed in (1, 2):
            fresh = random_call(
                JOINT.tokens, heads=4, kv_heads=2, size=128, dtype=torch.bfloat16, device="cuda", seed=seed
            )
            for static, values in zip(call, fresh, strict=True):
                static.copy_(values)
            graph.replay()
            assert (output.float() - run().float()).abs().max().item() < 2e-2


@ROUTES
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager(backend: str, topk: int) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        call = call_of()
        layer = layer_of("triton", topk=topk)
        expected = runs(layer, call)()
        record = JOINT.record()
        prepare_attention(layer, {"self": record}, {"self": (JOINT.tokens,) * 2})
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        output = compiled(*call[:3], record.with_layer_inputs(gate_compress=call[3]))
    assert (output.float() - expected.float()).abs().max().item() < 2e-2
    torch._dynamo.reset()


@ROUTES
def test_gradients_on_triton(topk: int) -> None:
    """Relative to float64's, of query, key, value and gate."""
    found = []
    for variant, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        call = [x.requires_grad_() for x in call_of(dtype)]
        output = layer_of(variant, topk=topk)(*call[:3], JOINT.record(call[3]))
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        found.append([x.double() for x in torch.autograd.grad((output * direction).sum(), call)])
    for ours, expected in zip(*found, strict=True):
        assert ((ours - expected).norm() / expected.norm()).item() < 1e-3
