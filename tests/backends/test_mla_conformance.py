"""The shipped conformance class of backends over latents on the reference."""

from __future__ import annotations

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.testing import MLABackendConformance


class TestTorchSDPA(MLABackendConformance):
    block_sizes = (8, 16, 24, 3, 1)

    def get_backend(self) -> type[AttentionBackend]:
        return TorchSDPABackend


class TestTorchSDPAHalf(TestTorchSDPA):
    dtype = torch.float16
