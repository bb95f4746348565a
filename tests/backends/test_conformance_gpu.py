"""The conformance class on the real kernels of this machine's GPU."""

from __future__ import annotations

import pytest
import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.cudnn_attn import CuDNNAttentionBackend
from omni_attn.backends.fastvideo_vsa import FastVideoVSABackend
from omni_attn.backends.flash_attn import FlashAttentionBackend
from omni_attn.backends.flashinfer_attn import FlashInferBackend
from omni_attn.backends.flex_attn import FlexAttentionBackend
from omni_attn.backends.sage_attn import SageAttentionBackend
from omni_attn.backends.sage_attn_3 import SageAttention3Backend
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.backends.trtllm_attn import TrtllmAttentionBackend
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
    head_size = 128

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


class TestFlash4(OnGPU):
    variant = "fa4"

    def get_backend(self) -> type[AttentionBackend]:
        return FlashAttentionBackend


class TestFlash2(OnGPU):
    variant = "fa2"

    def get_backend(self) -> type[AttentionBackend]:
        return FlashAttentionBackend


class TestFlex(OnGPU):
    def get_backend(self) -> type[AttentionBackend]:
        return FlexAttentionBackend


class TestFlashInferFA2(OnGPU):
    variant = "fa2"

    def get_backend(self) -> type[AttentionBackend]:
        return FlashInferBackend


class TestFlashInferFA3(TestFlashInferFA2):
    variant = "fa3"


class TestFlashInferFA3Wide(TestFlashInferFA3):
    head_size = 256


class TestFlashInferCuteDSL(TestFlashInferFA2):
    variant = "cute-dsl"
    head_size = 128


class TestSage1(OnGPU):
    """Int8: at a scale of 0.5 and head size 64, where softmax is sharp, single elements are off by up to 0.12."""

    variant = "sage1"
    tolerance = 0.15

    def get_backend(self) -> type[AttentionBackend]:
        return SageAttentionBackend


class TestSage2(TestSage1):
    variant = "sage2"


class TestSage3(OnGPU):
    """FP4, whose relative error is about a fifth."""

    tolerance = 0.5

    def get_backend(self) -> type[AttentionBackend]:
        return SageAttention3Backend


class TestTrtllmRagged(OnGPU):
    variant = "ragged"
    head_size = 128

    def get_backend(self) -> type[AttentionBackend]:
        return TrtllmAttentionBackend


class TestTrtllmFmhaV2(TestTrtllmRagged):
    variant = "fmha_v2"


class TestVSATriton(OnGPU):
    """All tiles, on the executor."""

    variant = "triton"

    def get_backend(self) -> type[AttentionBackend]:
        return FastVideoVSABackend


class TestVSATorch(TestVSATriton):
    variant = "torch"


class TestVSAFlash3(TestVSATriton):
    variant = "fa3"


class TestVSAFlash4(TestVSATriton):
    variant = "fa4"


class TestVSAFastVideo(TestVSATriton):
    variant = "fastvideo"


class TestVSAFlashInfer(TestVSATriton):
    variant = "flashinfer"


class TestVSAFlex(TestVSATriton):
    variant = "flex"
