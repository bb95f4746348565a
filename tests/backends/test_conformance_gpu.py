"""The conformance class on the real kernels of this machine's GPU."""

from __future__ import annotations

import pytest
import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.cudnn_attn import CuDNNAttentionBackend
from omni_attn.backends.flash_attn import FlashAttentionBackend
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.platforms import current_omni_platform
from omni_attn.testing import BackendConformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an NVIDIA GPU, found none on this machine"
    ),
]


class OnGPU(BackendConformance):
    """bfloat16 on the GPU; skipped where the backend's own facts refuse this machine."""

    device = "cuda"
    dtype = torch.bfloat16
    head_size = 64

    def setup_method(self) -> None:
        self.machine = current_omni_platform("cuda").device
        if reasons := self.reasons(dtype="bfloat16"):
            pytest.skip("; ".join(reasons))
        super().setup_method()


class TestTorchSDPA(OnGPU):
    def get_backend(self) -> type[AttentionBackend]:
        return TorchSDPABackend


class TestCuDNN(OnGPU):
    def get_backend(self) -> type[AttentionBackend]:
        return CuDNNAttentionBackend


class TestFlash3(OnGPU):
    variant = "fa3"

    def get_backend(self) -> type[AttentionBackend]:
        return FlashAttentionBackend


class TestFlash2(OnGPU):
    variant = "fa2"

    def get_backend(self) -> type[AttentionBackend]:
        return FlashAttentionBackend
