"""The shipped conformance class on our own backends: TORCH_SDPA for real, the others on stand-in kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from omni_attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from omni_attn.backends.cudnn_attn import CuDNNAttentionBackend
from omni_attn.backends.flash_attn import FlashAttentionBackend
from omni_attn.backends.masked import MaskedMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.torch_sdpa import TorchSDPABackend
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


class TestFlash2(TestFlash3):
    variant = "fa2"


class TestFlashOfNoStatedVariant(BackendConformance):
    """get_backend alone, as the docstring promises; the first variant is what is tested."""

    def get_backend(self) -> type[AttentionBackend]:
        return FlashAttentionBackend

    def kernels(self) -> AbstractContextManager[Any]:
        return fake_kernels("FLASH_ATTN")


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
