"""The shipped conformance class on our own backends: TORCH_SDPA for real, the others on stand-in kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from omni_attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from omni_attn.backends.aiter_quant_attn import AiterQuantBackend
from omni_attn.backends.cudnn_attn import CuDNNAttentionBackend
from omni_attn.backends.fastvideo_vsa import FastVideoVSABackend
from omni_attn.backends.flash_attn import FlashAttentionBackend
from omni_attn.backends.flash_attn_musa import MateFlashBackend
from omni_attn.backends.flash_attn_npu import MindieFlashBackend
from omni_attn.backends.flash_attn_rocm import AiterFlashBackend
from omni_attn.backends.flash_attn_xpu import XpuFlashBackend
from omni_attn.backends.flashinfer_attn import FlashInferBackend
from omni_attn.backends.flex_attn import FlexAttentionBackend
from omni_attn.backends.masked import MaskedMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.sage_attn import SageAttentionBackend
from omni_attn.backends.sage_attn_3 import SageAttention3Backend
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.backends.trtllm_attn import TrtllmAttentionBackend
from omni_attn.errors import MetadataError
from omni_attn.facts import BackendFacts
from omni_attn.ops.reference import reference_attention
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


class TestFlash4(TestFlash3):
    variant = "fa4"


class TestFlash2(TestFlash3):
    variant = "fa2"


class TestFlex(BackendConformance):
    def get_backend(self) -> type[AttentionBackend]:
        return FlexAttentionBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("FLEX_ATTN")


class TestTrtllmRagged(BackendConformance):
    variant = "ragged"
    head_size = 128

    def get_backend(self) -> type[AttentionBackend]:
        return TrtllmAttentionBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("TRTLLM_ATTN", self.variant)


class TestTrtllmFmhaV2(TestTrtllmRagged):
    variant = "fmha_v2"


class TestFlashOfNoStatedVariant(BackendConformance):
    """get_backend alone, as the docstring promises; the first variant is what is tested."""

    def get_backend(self) -> type[AttentionBackend]:
        return FlashAttentionBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("FLASH_ATTN")


class TestFlashInferFA2(BackendConformance):
    variant = "fa2"
    head_size = 64

    def get_backend(self) -> type[AttentionBackend]:
        return FlashInferBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("FLASHINFER_ATTN", self.variant)


class TestFlashInferFA3(TestFlashInferFA2):
    variant = "fa3"


class TestFlashInferCuteDSL(TestFlashInferFA2):
    variant = "cute-dsl"
    head_size = 128


class TestSage1(BackendConformance):
    variant = "sage1"
    head_size = 64

    def get_backend(self) -> type[AttentionBackend]:
        return SageAttentionBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("SAGE_ATTN", self.variant)


class TestSage1Head96(TestSage1):
    head_size = 96


class TestSage2(TestSage1):
    variant = "sage2"


class TestSage2PaddedHeads(TestSage2):
    head_size = 40


class TestSage3(BackendConformance):
    head_size = 64

    def get_backend(self) -> type[AttentionBackend]:
        return SageAttention3Backend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("SAGE_ATTN_3")


class TestFlashOnRocm(TestFlash3):
    variant = "aiter"

    def get_backend(self) -> type[AttentionBackend]:
        return AiterFlashBackend


class TestFlashOnNpu(TestFlash3):
    variant = "mindiesd"

    def get_backend(self) -> type[AttentionBackend]:
        return MindieFlashBackend


class TestFlashOnXpu(TestFlash3):
    variant = "vllm-xpu-kernels"
    head_size = 64

    def get_backend(self) -> type[AttentionBackend]:
        return XpuFlashBackend


class TestFlashOnMusa(TestFlash3):
    variant = "mate"

    def get_backend(self) -> type[AttentionBackend]:
        return MateFlashBackend


class TestAiterQuant(BackendConformance):
    head_size = 128

    def get_backend(self) -> type[AttentionBackend]:
        return AiterQuantBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("AITER_QUANT_ATTN")


class TestVSATorch(BackendConformance):
    """All tiles on the executor; tests/backends/test_fastvideo_vsa.py has the ones with fewer."""

    variant = "torch"

    def get_backend(self) -> type[AttentionBackend]:
        return FastVideoVSABackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("FASTVIDEO_VSA", self.variant)


class TestVSATriton(TestVSATorch):
    variant = "triton"


class TestVSAFastVideo(TestVSATorch):
    variant = "fastvideo"
    head_size = 64


class TestVSAFlashInfer(TestVSATorch):
    variant = "flashinfer"
    head_size = 128


class TestVSAFlex(TestVSATorch):
    variant = "flex"


class TestVSAFlash3(TestVSAFastVideo):
    variant = "fa3"


class TestVSAFlash4(TestVSAFastVideo):
    variant = "fa4"


def refuse_unequal(lengths: tuple[int, int]) -> None:
    if lengths[0] != lengths[1]:
        raise MetadataError(f"needs equal query and key lengths, found {lengths[0]} and {lengths[1]}")


class EqualLengthsBuilder(MaskedMetadataBuilder):
    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> Any:
        refuse_unequal(lengths)
        return super().build(record, lengths)


class EqualLengths(TorchSDPABackend):
    """A kernel for self-attention alone, which can all the rest."""

    facts = replace(TorchSDPABackend.facts, unequal_lengths=False)

    @staticmethod
    def get_builder_cls() -> type[EqualLengthsBuilder]:
        return EqualLengthsBuilder


class TestEqualLengths(BackendConformance):
    def get_backend(self) -> type[AttentionBackend]:
        return EqualLengths


class SquareBuilder(AttentionMetadataBuilder):
    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> None:
        refuse_unequal(lengths)


class SquareImpl(AttentionImpl):
    def forward(self, query: Any, key: Any, value: Any, metadata: None, **_: torch.Tensor) -> torch.Tensor:
        return reference_attention(query, key, value, softmax_scale=self.softmax_scale)[0].to(query.dtype)


class Square(EqualLengths):
    """The same without everything else."""

    facts = BackendFacts(dtypes=frozenset({"float32"}), unequal_lengths=False)

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return SquareImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return SquareBuilder


class TestSquare(BackendConformance):
    def get_backend(self) -> type[AttentionBackend]:
        return Square
