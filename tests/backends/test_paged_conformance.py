"""The shipped conformance class of paged backends on our own: on the CPU, with stand-ins where a package is needed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.flash_attn import FlashAttentionBackend
from omni_attn.backends.flashinfer_attn import FlashInferBackend
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.testing import PagedBackendConformance, fake_kernels


class TestTorchSDPA(PagedBackendConformance):
    block_sizes = (8, 16, 32, 24, 1, 3)

    def get_backend(self) -> type[AttentionBackend]:
        return TorchSDPABackend


class TestTorchSDPADouble(TestTorchSDPA):
    dtype = torch.float64


class TestFlash3(PagedBackendConformance):
    variant = "fa3"
    block_sizes = (8, 16, 24, 1, 13)

    def get_backend(self) -> type[AttentionBackend]:
        return FlashAttentionBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("FLASH_ATTN", self.variant)


class TestFlash4(TestFlash3):
    variant = "fa4"


class TestFlashInferFA2(PagedBackendConformance):
    variant = "fa2"
    head_size = 64
    block_sizes = (8, 16, 24, 1, 128)

    def get_backend(self) -> type[AttentionBackend]:
        return FlashInferBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("FLASHINFER_ATTN", self.variant)


class TestFlashInferFA3(TestFlashInferFA2):
    variant = "fa3"


class TestFlashInferManyHeads(TestFlashInferFA2):
    """Decode on tensor cores."""

    heads = 8
    kv_heads = 2
