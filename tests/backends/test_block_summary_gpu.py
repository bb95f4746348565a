"""BLOCK_SUMMARY_ATTN on this machine's GPU: conformance, numbers, gradients, and a host that never waits."""

from __future__ import annotations

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, VideoLayout, use_attention_config
from omni_attn.backends.abstract import AttentionBackend
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.block_sparse.triton_executor import TritonExecutor
from omni_attn.ops.block_summary import block_summary_attention
from omni_attn.platforms import current_omni_platform
from omni_attn.testing import BackendConformance
from tests.backends.block_summary_layers import config
from tests.backends.test_block_summary_conformance import OneTokenBlocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an NVIDIA GPU, found none on this machine"
    ),
    pytest.mark.filterwarnings("default"),  # kernel packages warn about much that is not ours
]
TOKENS = 1300  # 11 blocks, the last one of 20


class TestOneTokenBlocks(BackendConformance):
    variant = "triton"
    device = "cuda"
    dtype = torch.bfloat16
    head_size = 128
    tolerance = 2e-2

    def get_backend(self) -> type[AttentionBackend]:
        return OneTokenBlocks

    def setup_method(self) -> None:
        self.machine = current_omni_platform("cuda").device
        super().setup_method()


def on_gpu(variant: str, size: int = 128) -> Attention:
    with use_attention_config(config(variant=variant, sparsity=0.7), device="cuda"):
        return Attention(4, size, num_kv_heads=2, role="self")


def call(dtype: torch.dtype, size: int = 128) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, TOKENS + 12, heads, size) for heads in (4, 2, 2))
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]


def record() -> AttentionMetadata:
    return AttentionMetadata(video_layout=VideoLayout((100,), ((3, 20, 20),), TOKENS))


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-4), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_triton_equals_torch(dtype: torch.dtype, limit: float, size: int) -> None:
    query, key, value = call(dtype, size)
    for x in (query, key, value):
        x[:, TOKENS:] = float("nan")
    exact = on_gpu("torch", size)(query.double(), key.double(), value.double(), record())
    attention = on_gpu("triton", size)
    output = attention(query, key, value, record())
    assert attention.route == "BLOCK_SUMMARY_ATTN (triton): BLOCK_SUMMARY"
    assert not output[:, TOKENS:].any()
    assert (output.double() - exact).abs().max().item() < limit


def test_relative_error_in_bfloat16() -> None:
    """Where most of the mass lies in the summaries: what their rounding adds."""
    tensors = [x[:, :TOKENS] for x in call(torch.bfloat16)]
    exact = block_summary_attention(TorchExecutor(), *(x.double() for x in tensors), 128, 2, 128**-0.5)
    output = block_summary_attention(TritonExecutor(), *tensors, 128, 2, 128**-0.5)
    assert ((output.double() - exact).norm() / exact.norm()).item() < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_those_of_torch(dtype: torch.dtype) -> None:
    tensors = [x[:, :TOKENS].clone().requires_grad_() for x in call(dtype)]
    exact = [x.detach().double().requires_grad_() for x in tensors]
    direction = torch.randn(2, TOKENS, 4, 128, device="cuda")
    (block_summary_attention(TritonExecutor(), *tensors, 128, 3, 128**-0.5) * direction).sum().backward()
    (block_summary_attention(TorchExecutor(), *exact, 128, 3, 128**-0.5) * direction).sum().backward()
    for ours, theirs in zip(tensors, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        error = (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()
        assert error.item() < (1e-4 if dtype == torch.float32 else 1e-2)


def test_far_offsets() -> None:
    """One head of a fused projection: the last token lies more than 2**31 elements behind the first."""
    fused = torch.empty(1, 128 * 1094, 15360, device="cuda", dtype=torch.bfloat16)
    tensors = [part[..., :128].unflatten(-1, (1, 128)) for part in fused.chunk(3, dim=-1)]
    for tensor in tensors:
        tensor.normal_()
    output = block_summary_attention(TritonExecutor(), *tensors, 128, 20, 128**-0.5)
    dense = [x.contiguous() for x in tensors]
    assert torch.equal(output, block_summary_attention(TritonExecutor(), *dense, 128, 20, 128**-0.5))


def test_the_host_does_not_wait_and_calls_can_be_captured() -> None:
    attention, stated, tensors = on_gpu("triton"), record(), call(torch.bfloat16)
    expected = attention(*tensors, stated)
    attention(*tensors, stated)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(*tensors, stated)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(*tensors, stated)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)
