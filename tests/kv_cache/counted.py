"""Paged backends of the tests' own that count, layers on them, and the steps that they get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.backends.registry import register_diffusion_backend, unregister_diffusion_backend
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.backends.torch_sdpa_paged import TorchSDPAPagedBuilder, TorchSDPAPagedImpl
from omni_attn.facts import BackendFacts, CacheFacts, FullAttentionSpec, MultipleOf, Variant
from omni_attn.paged_layer import PagedAttention

CPU = torch.device("cpu")
SPEC = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")


@dataclass
class Tally:
    """What happened to one counting backend."""

    builds: list[CommonAttentionMetadata] = field(default_factory=list)
    captures: list[CommonAttentionMetadata] = field(default_factory=list)
    rebinds: int = 0
    impls: int = 0
    writes: int = 0


@contextmanager
def paged_backend(
    name: str, *, rebinds: bool = False, variants: tuple[str, ...] = (), invariant: bool = False, **cache: Any
) -> Iterator[Tally]:
    """Registers a backend over pages for the time of the block.

    Args:
        rebinds: its builder serves groups that differ in their page table from one product.
        variants: names of variants, all of them alike.
        cache: fields of its CacheFacts.
    """
    tally = Tally()

    class Builder(TorchSDPAPagedBuilder):
        supports_update_block_table = rebinds

        def build(self, common: CommonAttentionMetadata) -> Any:
            tally.builds.append(common)
            return super().build(common)

        def build_for_cudagraph_capture(self, common: CommonAttentionMetadata) -> Any:
            tally.captures.append(common)
            return super().build(common)

        def update_block_table(self, *arguments: Any) -> Any:
            tally.rebinds += 1
            return super().update_block_table(*arguments)

    class Impl(TorchSDPAPagedImpl):
        backend = name

        def __init__(self, **geometry: Any) -> None:
            super().__init__(**geometry)
            tally.impls += 1

        def update_kv_cache(self, *tensors: torch.Tensor) -> None:
            tally.writes += 1
            super().update_kv_cache(*tensors)

    plain = TorchSDPABackend.facts.paged
    assert plain is not None
    kernel = replace(
        plain, cache=CacheFacts(**{"causal_by_request": True} | cache), batch_invariant=invariant
    )
    named = tuple(Variant(name=variant, facts=kernel) for variant in variants)

    class Backend(AttentionBackend):
        facts = BackendFacts(stateless=False, paged=replace(kernel, variants=named))

        @staticmethod
        def get_name() -> str:
            return name

        @staticmethod
        def get_paged_impl_cls() -> type[TorchSDPAPagedImpl]:
            return Impl

        @staticmethod
        def get_paged_builder_cls() -> type[TorchSDPAPagedBuilder]:
            return Builder

    register_diffusion_backend(name, Backend)
    try:
        yield tally
    finally:
        unregister_diffusion_backend(name)


def layer(prefix: str, backend: str = "COUNTED", **needs: Any) -> PagedAttention:
    """A layer of 4 heads over 2, if nothing else is said."""
    stated: dict[str, Any] = {"role": "self", "num_kv_heads": 2, "kv_cache": SPEC, "config": backend}
    heads = needs.pop("num_heads", 4)
    return PagedAttention(heads, needs.pop("head_size", 8), prefix=prefix, **stated | needs)


def make_common(
    lengths: list[tuple[int, int]], *, block_size: int = 4, first_page: int = 1, **changes: Any
) -> CommonAttentionMetadata:
    """A step of (query tokens, all tokens) per request, with pages in a row from `first_page` on."""
    queries = torch.tensor([0, *(q for q, _ in lengths)], dtype=torch.int32)
    loc = queries.cumsum(0, dtype=torch.int32)
    totals = torch.tensor([keys for _, keys in lengths], dtype=torch.int32)
    width = max(-(-keys // block_size) for _, keys in lengths)
    table = torch.arange(first_page, first_page + len(lengths) * width, dtype=torch.int32).view(-1, width)
    slots = [
        int(table[row, place // block_size]) * block_size + place % block_size
        for row, (new, keys) in enumerate(lengths)
        for place in range(keys - new, keys)
    ]
    stated: dict[str, Any] = {
        "query_start_loc": loc.clone(),
        "query_start_loc_cpu": loc,
        "seq_lens": totals.clone(),
        "seq_lens_cpu": totals,
        "num_reqs": len(lengths),
        "num_actual_tokens": int(loc[-1]),
        "max_query_len": max(q for q, _ in lengths),
        "max_seq_len": max(keys for _, keys in lengths),
        "block_table": table,
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
        "causal": False,
    }
    kind = changes.pop("kind", CommonAttentionMetadata)
    made: CommonAttentionMetadata = kind(**stated | changes)
    return made


EIGHTS = (MultipleOf(base=8),)
