"""SAGE_ATTN_3: SageAttention 3, queries, keys, weights and values in FP4. Quantised, so never a default.

Package and module: sageattn3, built from source on the machine that it is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.optional_package import import_symbols
from omni_attn.backends.whole import WholeImpl, WholeMetadataBuilder
from omni_attn.facts import BackendFacts, CapabilityRange, HeadSizes, KernelFacts, PackageRequirement
from omni_attn.ops.layout import fits_int32, item_by_item
from omni_attn.ops.operators import needs_operator

SAGE3_PACKAGE = PackageRequirement(
    distribution="sageattn3",
    module="sageattn3",
    symbols=("sageattn3_blackwell",),
    install=(
        "pip install --no-build-isolation "
        "git+https://github.com/thu-ml/SageAttention#subdirectory=sageattention3_blackwell"
    ),
)
# The function in use, for the operator below: an operator's arguments are tensors, numbers and text.
_kernels: dict[str, Callable[..., torch.Tensor]] = {}


class Sage3MetadataBuilder(WholeMetadataBuilder):
    """Holds every sequence against the limits of the kernel."""

    @property
    def label(self) -> str:
        """SAGE_ATTN_3."""
        return "SAGE_ATTN_3"

    @property
    def kernel_facts(self) -> KernelFacts:
        """Limits of the kernel."""
        return SageAttention3Backend.facts


class SageAttention3Impl(WholeImpl):
    """One layer on SageAttention 3."""

    backend: ClassVar[str] = "SAGE_ATTN_3"
    label: str = "SAGE_ATTN_3"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        self.kernel = import_symbols(self.backend, SAGE3_PACKAGE)["sageattn3_blackwell"]
        _kernels["sageattn3_blackwell"] = self.kernel

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Where a copy is loaded, the operator has to find its kernel too."""
        self.__dict__.update(state)
        _kernels["sageattn3_blackwell"] = self.kernel

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See WholeImpl.attend."""
        if needs_operator(query, key, value):
            return torch.ops.omni_attn.sage_attn_3(query, key, value)  # type: ignore[no-any-return]
        return attend_in_fp4(self.kernel, query, key, value)


def attend_in_fp4(
    kernel: Callable[..., torch.Tensor],
    query_BSHD: torch.Tensor,
    key_BSHD: torch.Tensor,
    value_BSHD: torch.Tensor,
) -> torch.Tensor:
    """Output [B, Sq, H, D], contiguous. The kernel computes offsets in 32 bits, so large batches run in parts."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # The kernel centres keys in place, so it gets a copy, in the dense layout that it would copy them to anyway.
        own_key = key.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        output = kernel(query.transpose(1, 2), own_key, value.transpose(1, 2))
        return output.transpose(1, 2).contiguous()

    if fits_int32(query_BSHD, key_BSHD, value_BSHD):
        return attend(query_BSHD, key_BSHD, value_BSHD)
    return item_by_item(attend, query_BSHD, key_BSHD, value_BSHD)


@torch.library.custom_op("omni_attn::sage_attn_3", mutates_args=())
def _sage_attn_3(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return attend_in_fp4(_kernels["sageattn3_blackwell"], query, key, value)


@_sage_attn_3.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)


class SageAttention3Backend(AttentionBackend):
    """SageAttention 3 from its own package."""

    facts: ClassVar[BackendFacts] = BackendFacts(
        summary="SageAttention 3, everything in FP4",
        device_kinds=frozenset({"cuda"}),
        # Its setup also builds for 10.0, but the kernel itself raises on all but 12.0 (newer sources: and 12.1).
        capabilities=(
            CapabilityRange(minimum=(12, 0), below=(12, 1)),
            CapabilityRange(minimum=(12, 1), below=(12, 2)),
        ),
        packages=(SAGE3_PACKAGE,),
        # From 256 on the function prints a line and runs torch's attention: another backend under this name.
        head_sizes=HeadSizes(allowed=(64, 128)),
        # The causal loop does not add the product of the first masked tile to the output (read in the source, which
        # could not be run here), so causal layers are refused until somebody has checked it on hardware.
        causal=False,
        custom_scale=False,
        packing=True,
        device_boundaries=False,
        compile_mode="custom_op",
        numerics="quantised",
        # Emulated in torch from the kernel's published arithmetic, on random data: nobody has run it here.
        error="1.9e-1",
        sequence_parallel=frozenset({"ulysses", "allgather_kv"}),
    )

    @staticmethod
    def get_name() -> str:
        """SAGE_ATTN_3."""
        return "SAGE_ATTN_3"

    @staticmethod
    def get_impl_cls() -> type[SageAttention3Impl]:
        """SageAttention3Impl."""
        return SageAttention3Impl

    @staticmethod
    def get_builder_cls() -> type[Sage3MetadataBuilder]:
        """Sage3MetadataBuilder."""
        return Sage3MetadataBuilder
