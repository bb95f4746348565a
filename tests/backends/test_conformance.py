"""The shipped conformance class on our own backends: TORCH_SDPA for real, the others on stand-in kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.cudnn_attn import CuDNNAttentionBackend
from omni_attn.backends.flash_attn import FlashAttentionBackend
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.testing import BackendConformance, fake_kernels


class TestTorchSDPA(BackendConformance):
    def get_backend(self) -> type[AttentionBackend]:
        return TorchSDPABackend


class TestCuDNN(BackendConformance):
    def get_backend(self) -> type[AttentionBackend]:
        return CuDNNAttentionBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("CUDNN_ATTN")


class TestFlash3(BackendConformance):
    variant = "fa3"

    def get_backend(self) -> type[AttentionBackend]:
        return FlashAttentionBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("FLASH_ATTN", self.variant)


class TestFlash2(TestFlash3):
    variant = "fa2"
