"""Small complete backends that these tests register, and short ways to ask a question.

They run on any device and in any float dtype, so that what differs between two of them is only what a test is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from omni_attn.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.registry import (
    load_backend,
    register_diffusion_backend,
    unregister_diffusion_backend,
)
from omni_attn.backends.torch_sdpa import TorchSDPABackend, TorchSDPAImpl
from omni_attn.config import AttentionConfig
from omni_attn.facts import AttentionRequest, BackendFacts, HeadSizes, KernelFacts, PackageRequirement
from omni_attn.ops.reference import reference_attention
from omni_attn.platforms import current_omni_platform
from omni_attn.testing import fake_device

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
HERE = "tests.selection.stubs"
# The distributions of every family that a default order could look at, at versions which satisfy their limits.
EVERY_PACKAGE = {
    "flash-attn": "2.8.3",
    "flash-attn-3": "3.0.0",
    "flash-attn-4": "4.0.0b36",
    "fa3-fwd": "0.0.3",
    "tokenspeed-fa3": "3.0.0.post20260810",
    "flashinfer-python": "0.6.18",
    "triton": "3.6.0",
    "sageattention": "2.2.0",
    "sageattn3": "1.0.0",
    "fastvideo-kernel": "0.3.5",
    "amd-aiter": "0.1.7",
    "mindiesd": "3.1.0",
    "vllm-xpu-kernels": "0.1.16.2",
    "mate": "0.1.3",
}


@dataclass(frozen=True)
class DenseMetadata:
    """Dense attention needs nothing prepared."""


class DenseBuilder(AttentionMetadataBuilder):
    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> DenseMetadata:
        return DenseMetadata()


class GridBuilder(DenseBuilder):
    """Counts what it makes."""

    reads: ClassVar[frozenset[str]] = frozenset({"vsa_dit_seq_shape"})
    built: ClassVar[list[tuple[int, int]]] = []

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> DenseMetadata:
        self.built.append(lengths)
        return DenseMetadata()


class ReferenceImpl(AttentionImpl):
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any, **_: torch.Tensor
    ) -> torch.Tensor:
        return reference_attention(query, key, value, softmax_scale=self.softmax_scale)[0].to(query.dtype)


class _Dense(AttentionBackend):
    facts = BackendFacts(dtypes=FLOATS)

    @staticmethod
    def get_name() -> str:
        return "DENSE_TEST"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return ReferenceImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return DenseBuilder


class PlainBackend(_Dense):
    """Serves all that is dense and unmasked."""

    @staticmethod
    def get_name() -> str:
        return "PLAIN_TEST"


class PlainTwin(PlainBackend):
    """The same name with other limits."""

    facts = BackendFacts(dtypes=FLOATS, head_sizes=HeadSizes(multiple_of=64))


class OptionModel(BaseModel):
    model_config = ConfigDict(extra="forbid")
    strength: int = 1


class OptionsBackend(PlainBackend):
    options_model = OptionModel

    @staticmethod
    def get_name() -> str:
        return "OPTIONS_TEST"


class PackagedBackend(PlainBackend):
    """Needs a package, on whatever device."""

    facts = BackendFacts(
        dtypes=FLOATS,
        packages=(
            PackageRequirement(
                distribution="omni-attn-test-kernel",
                module="omni_attn_test_kernel",
                symbols=("attend",),
                minimum="1.2",
            ),
        ),
    )

    @staticmethod
    def get_name() -> str:
        return "PACKAGED_TEST"


class SparseBackend(_Dense):
    """What a video sparse kernel looks like from outside: its grid or nothing, self-attention only."""

    facts = BackendFacts(
        dtypes=FLOATS,
        head_sizes=HeadSizes(multiple_of=32),
        needs_video_grid=True,
        unequal_lengths=False,
        numerics="approximate",
    )

    @staticmethod
    def get_name() -> str:
        return "SPARSE_TEST"

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return GridBuilder


class OwnSDPAImpl(TorchSDPAImpl):
    """What a platform of its own brings for a known name."""


class OwnSDPABackend(TorchSDPABackend):
    @staticmethod
    def get_impl_cls() -> type[OwnSDPAImpl]:
        return OwnSDPAImpl


@contextmanager
def registered(*pairs: tuple[str, str | type[AttentionBackend]]) -> Iterator[None]:
    """Registers (name, class or path) pairs and takes them back."""
    try:
        for name, target in pairs:
            register_diffusion_backend(name, target)
        yield
    finally:
        for name, _ in pairs:
            unregister_diffusion_backend(name)


def ask(role: str = "self", **needs: Any) -> AttentionRequest:
    """A layer of Wan's size in bfloat16 that passes no masks, and whatever else is needed; "self" has a grid."""
    usual: dict[str, Any] = {
        "num_heads": 12,
        "head_size": 128,
        "dtype": "bfloat16",
        "mask_usage": "never",
        "video_grid": role == "self",
    }
    return AttentionRequest(role=role, **(usual | needs))


def choose(value: object) -> AttentionConfig:
    """A config from any mapping form, without looking at this machine's environment."""
    return AttentionConfig.model_validate(value)


def packages_for(kernel: KernelFacts) -> dict[str, str]:
    """EVERY_PACKAGE, with those that the kernel asks for in versions which it takes."""
    own = {p.distribution: p.minimum or "1.0" for p in kernel.packages}
    fitting = {
        p.distribution: EVERY_PACKAGE[p.distribution]
        for p in kernel.packages
        if p.distribution in EVERY_PACKAGE and p.accepts_version(EVERY_PACKAGE[p.distribution])
    }
    return EVERY_PACKAGE | own | fitting


def kernels_of(name: str, device: str = "sm_90") -> list[tuple[str | None, KernelFacts]]:
    """(variant, facts) of each kernel behind a registered name on a device; variant None where there is only one."""
    path = current_omni_platform(fake_device(device)).class_path(name)
    facts = load_backend(path, name).facts
    return [(variant.name, variant.facts) for variant in facts.variants] or [(None, facts)]
