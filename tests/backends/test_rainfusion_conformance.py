"""The shipped conformance class on RAINFUSION_ATTN: its dense route, and its sparse one where no block is left out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.rainfusion_attn import RainFusionBackend
from omni_attn.backends.rainfusion_builder import RainFusionMetadataBuilder
from omni_attn.testing import BackendConformance, fake_kernels
from omni_attn.testing.harness import TOLERANCE


class TestTorch(BackendConformance):
    """Short videos are dense."""

    variant = "torch"
    tolerance = TOLERANCE[torch.float32]

    def get_backend(self) -> type[AttentionBackend]:
        return RainFusionBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("RAINFUSION_ATTN", self.variant)


class TestTriton(TestTorch):
    variant = "triton"


class TestMindie(TestTorch):
    variant = "mindiesd"
    dtype = torch.float16
    tolerance = TOLERANCE[torch.float16]
    head_size = 64


class AlwaysSparseBuilder(RainFusionMetadataBuilder):
    block_size = 4
    min_video_blocks = 0


class AlwaysSparse(RainFusionBackend):
    @staticmethod
    def get_builder_cls() -> type[RainFusionMetadataBuilder]:
        return AlwaysSparseBuilder


class TestSparseWithAllBlocks(TestTorch):
    """The harness states a video of one frame, all of whose blocks are protected: the sparse route, without a loss."""

    def get_backend(self) -> type[AttentionBackend]:
        return AlwaysSparse


class TestSparseOnFlash3(TestSparseWithAllBlocks):
    variant = "fa3"
    dtype = torch.float16
    tolerance = TOLERANCE[torch.float16]


class TestSparseOnFlash4(TestSparseOnFlash3):
    variant = "fa4"


class TestSparseOnFlex(TestSparseWithAllBlocks):
    variant = "flex"
    head_size = 64


class TestSparseOnFastVideo(TestSparseWithAllBlocks):
    variant = "fastvideo"
    dtype = torch.bfloat16
    tolerance = TOLERANCE[torch.bfloat16]
    head_size = 64


class TestSparseOnFlashInfer(TestSparseOnFastVideo):
    variant = "flashinfer"
    head_size = 128
