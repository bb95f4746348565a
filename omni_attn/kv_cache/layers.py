"""What a layer over a paged KV cache shows to whoever runs its model: PagedAttention, MLAAttention, a model's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from omni_attn.backends.paged import PagedMetadataBuilder
from omni_attn.facts.kv_cache import KVCacheSpec

if TYPE_CHECKING:
    from omni_attn.selector import Selection


@runtime_checkable
class PagedLayer(Protocol):
    """What a layer over a paged KV cache shows to whoever runs its model.

    Attributes:
        prefix: its unique name in the model.
        cache_group: name of the page table that it uses.
        kv_sharing_target: prefix of an earlier layer whose cache it reads in place of one of its own, or None.
    """

    prefix: str
    cache_group: str
    kv_sharing_target: str | None

    @property
    def selection(self) -> Selection | None:
        """What was selected."""

    @property
    def impl(self) -> object:
        """What runs its kernels."""

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """What it keeps, with the page size of the page table."""

    @property
    def group_key(self) -> tuple[object, ...]:
        """All that changes what its builder makes of a step, page table and page size aside."""

    def take_kernel_block_size(self, block_size: int) -> None:
        """Tells it the page size that its kernels get."""

    def make_builder(
        self, spec: KVCacheSpec, layer_names: Sequence[str], device: torch.device
    ) -> PagedMetadataBuilder:
        """A builder of its backend, for it and the others of its group."""


def paged_layers(model: torch.nn.Module) -> tuple[PagedLayer, ...]:
    """The paged layers of a model, in the order in which its modules are registered."""
    return tuple(module for module in model.modules() if isinstance(module, PagedLayer))
