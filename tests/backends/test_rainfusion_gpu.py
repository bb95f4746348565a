"""RAINFUSION_ATTN on this machine's GPU: conformance, the sparse numbers, and a host that never waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, use_attention_config
from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.rainfusion_facts import MINDIE, RAINFUSION_VARIANTS
from omni_attn.errors import BackendRejectedError
from omni_attn.ops.block_sparse.block_map import blocks_of_map
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.prefix_selector import prefix_dense_topk
from omni_attn.ops.block_sparse.subblock_selector import subblock_lse_topk
from omni_attn.ops.block_sparse.threshold_selector import rf_softmax_threshold
from omni_attn.platforms import current_omni_platform
from omni_attn.testing import BackendConformance
from tests.backends.rainfusion_layers import JOINT, blocks_of, config
from tests.backends.test_rainfusion_conformance import AlwaysSparse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an NVIDIA GPU, found none on this machine"
    ),
]


class TestSparseWithAllBlocks(BackendConformance):
    variant = "triton"
    device = "cuda"
    dtype = torch.bfloat16
    head_size = 128
    tolerance = 2e-2

    def get_backend(self) -> type[AttentionBackend]:
        return AlwaysSparse

    def setup_method(self) -> None:
        self.machine = current_omni_platform("cuda").device
        if reasons := self.reasons(dtype="bfloat16"):
            pytest.skip("; ".join(reasons))
        super().setup_method()


@pytest.fixture
def _small_blocks() -> Iterator[None]:
    with blocks_of(32):
        yield


def on_gpu(variant: str) -> Attention:
    chosen = config(sparsity=0.7).per_role["self"].model_copy(update={"variant": variant})
    with use_attention_config({"default": chosen}, device="cuda"):
        return Attention(4, 64, num_kv_heads=2, role="self", video_grid=True)


def call(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 240, heads, 64) for heads in (4, 2, 2))
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_torch(dtype: torch.dtype) -> None:
    query, key, value = call(dtype)
    for x in (query, key, value):
        x[:, 232:] = float("nan")
    record = AttentionMetadata(video_layout=JOINT)
    exact = on_gpu("torch")(query.double(), key.double(), value.double(), record)
    output = on_gpu("triton")(query, key, value, AttentionMetadata(video_layout=JOINT))
    assert not output[:, 232:].any()
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert (output.double() - exact).abs().max().item() < limit


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("variant", [v.name for v in RAINFUSION_VARIANTS if v.name not in (MINDIE, "torch")])
def test_every_executor_equals_torch(variant: str) -> None:
    query, key, value = call(torch.bfloat16)
    try:
        layer = on_gpu(variant)
    except BackendRejectedError as error:
        pytest.skip(str(error).splitlines()[0])
    exact = on_gpu("torch")(
        query.double(), key.double(), value.double(), AttentionMetadata(video_layout=JOINT)
    )
    output = layer(query, key, value, AttentionMetadata(video_layout=JOINT))
    assert (output.double() - exact).abs().max().item() < 2e-2


def selections(scores: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> list[SelectedBlocks]:
    protected = torch.arange(scores.shape[-1], device=scores.device) < 2
    return [
        prefix_dense_topk(scores, 3, 4),
        prefix_dense_topk(scores, 3, 4, compete=True),
        rf_softmax_threshold(scores, 5, protected),
        blocks_of_map(scores > 0),
        subblock_lse_topk(query, key, 0.1, 0.9, block_q=16, block_k=16),
    ]


def test_selectors_equal_those_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (torch.randn(2, 3, 40, 40, generator=generator) * 2).round()  # with ties
    scores[0, 0, 5, 7] = float("nan")
    query, key = (torch.randn(1, 650, 2, 64, generator=generator) for _ in range(2))
    here = selections(scores.cuda(), query.cuda(), key.cuda())
    for found, expected in zip(here, selections(scores, query, key), strict=True):
        assert torch.equal(found.counts.cpu(), expected.counts)
        assert torch.equal(found.indices.cpu(), expected.indices)


@pytest.mark.usefixtures("_small_blocks")
def test_the_host_does_not_wait_and_calls_can_be_captured() -> None:
    attention, record, tensors = on_gpu("triton"), AttentionMetadata(video_layout=JOINT), call(torch.bfloat16)
    expected = attention(*tensors, record)
    attention(*tensors, record)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(*tensors, record)
        selections(
            torch.randn(1, 1, 40, 40, device="cuda"), *(torch.randn(1, 650, 2, 64, device="cuda"),) * 2
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(*tensors, record)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)
