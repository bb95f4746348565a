"""The shipped conformance class on MiniMax-H3's override: a token, then a video of one row, with all tiles kept."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from omni_attn import AttentionMetadata, VideoLayout
from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.fastvideo_vsa import FastVideoVSABackend
from omni_attn.config import AttentionSpec
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import MiniMaxH3VSAImpl, MiniMaxH3VSAMetadataBuilder
from omni_attn.testing import BackendConformance, fake_kernels
from omni_attn.testing.harness import TOLERANCE


class OnExecutor(MiniMaxH3VSAMetadataBuilder):
    """Keeps the executor where all tiles are kept, so that it owes the numbers of dense attention."""

    def attend_to_all(self, record: AttentionMetadata, made: Any, every: str) -> Any:
        return made


class H3OnExecutor(MiniMaxH3VSAImpl):
    builder_cls = OnExecutor


class H3Backend(FastVideoVSABackend):
    @staticmethod
    def get_impl_cls() -> type[MiniMaxH3VSAImpl]:
        return MiniMaxH3VSAImpl


class H3ExecutorBackend(FastVideoVSABackend):
    @staticmethod
    def get_impl_cls() -> type[H3OnExecutor]:
        return H3OnExecutor


class TestDenseRoute(BackendConformance):
    variant = "torch"
    tolerance = TOLERANCE[torch.float32]
    spec = AttentionSpec(backend="FASTVIDEO_VSA", fastvideo_vsa={"topk": 64, "tile_size": (1, 2, 2)})

    def get_backend(self) -> type[AttentionBackend]:
        return H3Backend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("FASTVIDEO_VSA", self.variant)

    def stated(self, record: AttentionMetadata | None, lengths: tuple[int, int]) -> AttentionMetadata:
        """One token of a segment, then a video of one row."""
        record = record or AttentionMetadata()
        used = lengths[0] if record.packed_padding is None else record.packed_padding.q_length
        prefix, spans = ((1,), ((1, 1, used - 1),)) if used > 1 else ((), ((1, 1, used),) if used else ())
        return replace(record, video_layout=VideoLayout(prefix, spans, used))


class TestTorch(TestDenseRoute):
    def get_backend(self) -> type[AttentionBackend]:
        return H3ExecutorBackend


class TestTriton(TestTorch):
    variant = "triton"


class TestFastVideo(TestTorch):
    variant = "fastvideo"
    dtype = torch.bfloat16
    tolerance = TOLERANCE[torch.bfloat16]
    head_size = 64


class TestFlashInfer(TestFastVideo):
    variant = "flashinfer"
    head_size = 128


class TestFlex(TestTorch):
    variant = "flex"


class TestFlash3(TestFastVideo):
    variant = "fa3"
    dtype = torch.float16
    tolerance = TOLERANCE[torch.float16]


class TestFlash4(TestFlash3):
    variant = "fa4"
