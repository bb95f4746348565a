"""What tests of a backend over a paged KV cache share: scenes, an impl, its builder and cache, and the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omni_attn.backends.paged import PagedAttentionImpl, PagedMetadataBuilder
from omni_attn.facts import KernelFacts
from omni_attn.facts.kv_cache import CacheFacts, FullAttentionSpec, KVCacheSpec, is_kernel_block_size
from omni_attn.testing.harness import BackendHarness
from omni_attn.testing.paged_scene import PagedScene, make_scene

#: (query tokens, all tokens) of the requests of a mixed batch: decode, first chunk, later chunk, within one page.
MIXED = ((1, 19), (9, 9), (7, 30), (2, 3))
Prepared = tuple[PagedAttentionImpl, PagedMetadataBuilder, torch.Tensor]


class PagedHarness(BackendHarness):
    """One factory method to write, `get_backend`; see BackendHarness for the rest.

    Attributes:
        block_sizes: tokens of a page that are tried; those that the facts do not take are left out.
    """

    block_sizes: tuple[int, ...] = (8, 16, 32, 24)

    @property
    def facts(self) -> KernelFacts:
        """Facts of the variant under test, of its paged side."""
        facts = self.get_backend().facts.paged
        assert facts is not None, f"{self.get_backend().get_name()} has no kernel over a paged KV cache"
        return next((v.facts for v in facts.variants if self.variant in (None, v.name)), facts)

    @property
    def cache(self) -> CacheFacts:
        """What the kernel takes of a cache."""
        return self.get_backend().get_cache_facts(self.variant)

    @property
    def sizes(self) -> list[int]:
        """Page sizes that the kernel takes, of `block_sizes`."""
        return [size for size in self.block_sizes if is_kernel_block_size(self.cache.block_sizes, size)]

    @property
    def flags(self) -> list[bool]:
        """Which of causal and non-causal attention the kernel has."""
        return [True] * self.facts.causal + [False] * self.cache.non_causal

    def cache_spec(self, **changes: Any) -> KVCacheSpec:
        """Of a full cache, in the dtype of the tensors unless stated otherwise."""
        own = {"block_size": self.sizes[0], "num_kv_heads": self.heads, "head_size": self.head_size}
        return FullAttentionSpec(**{**own, "dtype": str(self.dtype).removeprefix("torch."), **changes})

    def scene(self, lengths: Sequence[tuple[int, int]] = MIXED, **how: Any) -> PagedScene:
        """A step of requests of (query tokens, all tokens); `how` as make_scene has it, or of the cache's spec."""
        names = ("block_size", "num_kv_heads", "dtype")
        spec = self.cache_spec(**{name: how.pop(name) for name in names if name in how})
        return make_scene(
            lengths, spec=spec, num_heads=self.heads, dtype=self.dtype, device=self.device, **how
        )

    def ready(self, scene: PagedScene, layout: str | None = None, **geometry: Any) -> Prepared:
        """An impl and a builder for the scene, and a cache that holds its earlier tokens and its own."""
        arguments: dict[str, Any] = {
            "num_heads": self.heads,
            "num_kv_heads": scene.spec.num_kv_heads,
            "head_size": self.head_size,
            "softmax_scale": self.head_size**-0.5,
            "causal": scene.common.causal is True,
            "spec": self.spec,
            "variant": self.variant or self.first_variant(),
            "kv_cache_spec": scene.spec,
            **geometry,
        }
        backend = self.get_backend()
        device = scene.query.device
        builder = backend.get_paged_builder_cls()(layer_names=("layer",), device=device, **arguments)
        impl = backend.get_paged_impl_cls()(**arguments)
        cache = scene.empty_cache(layout or self.cache.layouts[0])
        if scene.history_slots.numel():
            impl.update_kv_cache(*scene.history, cache, scene.history_slots)
        impl.update_kv_cache(scene.key, scene.value, cache, scene.slot_mapping)
        return impl, builder, cache

    def first_variant(self) -> str | None:
        """The first variant of the facts, None without any."""
        paged = self.get_backend().facts.paged
        return next((v.name for v in paged.variants), None) if paged else None

    def attend(self, scene: PagedScene, prepared: Prepared, metadata: Any = None) -> torch.Tensor:
        """One call: the output [T, H, D], which started as NaN."""
        impl, builder, cache = prepared
        if metadata is None:
            metadata = builder.build(scene.common)
        output = torch.full_like(scene.query, float("nan")).contiguous()
        given = impl.forward(scene.query, scene.key, scene.value, cache, metadata, output)
        assert given is output, "forward gives the output back that it was handed"
        return output

    def check(self, scene: PagedScene, layout: str | None = None, **geometry: Any) -> torch.Tensor:
        """Asserts that a scene gives what REF gives; returns what the backend gave."""
        output = self.attend(scene, self.ready(scene, layout, **geometry))
        causal = scene.common.causal
        flags = causal if isinstance(causal, bool) else [bool(x) for x in causal.tolist()]
        expected = scene.expected(
            causal=flags, window=geometry.get("window"), scale=geometry.get("softmax_scale")
        )
        self.close(output[: len(expected)], expected)
        return output

    def reasons(self, **needs: Any) -> tuple[str, ...]:
        """Why the facts refuse a request with these needs; empty = they accept it."""
        heads = {"num_heads": self.heads, "num_kv_heads": self.heads, "head_size": self.head_size}
        return super().reasons(**{**heads, "kv_cache": self.cache_spec(), **needs})


def written_and_attended(
    impl: PagedAttentionImpl,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    metadata: Any,
    output: torch.Tensor,
) -> torch.Tensor:
    """What a layer does in a step, for a compiler."""
    impl.update_kv_cache(key, value, cache, slots)
    return impl.forward(query, key, value, cache, metadata, output)
