"""The shipped conformance class on BLOCK_SUMMARY_ATTN: its dense route, and its sparse one over blocks of one token.

The mean of one token is that token: over such blocks the method is dense attention, which a kernel must reach.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.block_summary_attn import BlockSummaryBackend
from omni_attn.backends.block_summary_builder import BlockSummaryMetadataBuilder
from omni_attn.testing import BackendConformance, fake_kernels
from omni_attn.testing.harness import TOLERANCE


class OneTokenBuilder(BlockSummaryMetadataBuilder):
    block_size = 1


class OneTokenBlocks(BlockSummaryBackend):
    @staticmethod
    def get_builder_cls() -> type[BlockSummaryMetadataBuilder]:
        return OneTokenBuilder


class TestTorch(BackendConformance):
    variant = "torch"
    tolerance = TOLERANCE[torch.float32]

    def get_backend(self) -> type[AttentionBackend]:
        return OneTokenBlocks

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("BLOCK_SUMMARY_ATTN", self.variant)


class TestTriton(TestTorch):
    variant = "triton"


class TestShortSequencesAreDense(TestTorch):
    def get_backend(self) -> type[AttentionBackend]:
        return BlockSummaryBackend
