"""What PagedBackendConformance is there to find, on TORCH_SDPA with one fault at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.backends.torch_sdpa_paged import GatheredMetadata, TorchSDPAPagedBuilder, TorchSDPAPagedImpl
from omni_attn.ops.paged.gather import page_mask
from omni_attn.testing import PagedBackendConformance
from omni_attn.testing.conformance import run_conformance

Changed = dict[str, Any]


def causal_at_the_top_left(metadata: GatheredMetadata, common: CommonAttentionMetadata) -> Changed:
    mask = page_mask(
        common.query_start_loc.diff(), common.seq_lens, metadata.mask.shape[-2:], causal=False, window=None
    )
    return {"mask": mask & torch.ones(metadata.mask.shape[-2:], dtype=torch.bool).tril()}


def one_key_too_few(metadata: GatheredMetadata, common: CommonAttentionMetadata) -> Changed:
    mask = metadata.mask.clone()
    mask[..., -1] &= mask[..., -1:].sum(-1) == 0
    return {"mask": mask}


def pages_of_another(metadata: GatheredMetadata, common: CommonAttentionMetadata) -> Changed:
    return {"block_table": metadata.block_table.flip(0)}


def all_of_the_table(metadata: GatheredMetadata, common: CommonAttentionMetadata) -> Changed:
    return {"seq_lens": torch.full_like(metadata.seq_lens, metadata.num_keys)}


@pytest.mark.parametrize(
    "fault", [causal_at_the_top_left, one_key_too_few, pages_of_another, all_of_the_table]
)
def test_wrong_steps_are_found(fault: Callable[..., Changed]) -> None:
    class Builder(TorchSDPAPagedBuilder):
        def build(self, common: CommonAttentionMetadata) -> GatheredMetadata:
            metadata = super().build(common)
            return replace(metadata, **fault(metadata, common))

    assert "test_paged_equals_dense" in faults_of(builder_cls=Builder)


@pytest.mark.parametrize(
    ("name", "found_by"),
    [
        ("written at 0 where -1 stands", "test_slots_that_are_not_written"),
        ("keeps the first write", "test_slots_are_written_over"),
        ("a new output", "test_paged_equals_dense"),
        ("a scale dropped", "test_output_scales_are_refused"),
        ("heads in another order", "test_grouped_heads_repeat_interleaved"),
        ("one scale for both", "test_cache_of_fewer_bits"),
    ],
)
def test_wrong_impls_are_found(name: str, found_by: str) -> None:
    class Impl(TorchSDPAPagedImpl):
        def update_kv_cache(self, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
            if name == "written at 0 where -1 stands":
                slot_mapping = slot_mapping.clamp(min=0)
            if name == "keeps the first write" and slot_mapping.numel():
                first = kv_cache.view(torch.uint8).view(kv_cache.dtype).clone()
                super().update_kv_cache(key, value, kv_cache, slot_mapping)
                kv_cache.copy_(
                    torch.where(first.float().isnan(), kv_cache.float(), first.float()).to(first.dtype)
                )
                return
            super().update_kv_cache(key, value, kv_cache, slot_mapping)

        def refuse_output_scales(self, *scales: torch.Tensor | None) -> None:
            if name != "a scale dropped":
                super().refuse_output_scales(*scales)

        def forward(
            self,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            metadata: Any,
            output: Any,
            *scales: Any,
            **more: Any,
        ) -> Any:
            if name == "a new output":
                output = output.clone()
            if name == "one scale for both":
                self.value_scale = self.key_scale
            if name == "heads in another order":
                query = query.unflatten(1, (-1, self.num_kv_heads)).transpose(1, 2).flatten(1, 2)
            return super().forward(query, key, value, kv_cache, metadata, output, *scales, **more)

    assert found_by in faults_of(impl_cls=Impl)


def faults_of(**classes: Any) -> set[str]:
    """Tests that TORCH_SDPA with other classes fails."""

    class Backend(TorchSDPABackend):
        @staticmethod
        def get_paged_impl_cls() -> type[TorchSDPAPagedImpl]:
            return classes.get("impl_cls", TorchSDPAPagedImpl)  # type: ignore[no-any-return]

        @staticmethod
        def get_paged_builder_cls() -> type[TorchSDPAPagedBuilder]:
            return classes.get("builder_cls", TorchSDPAPagedBuilder)  # type: ignore[no-any-return]

    class Suite(PagedBackendConformance):
        def get_backend(self) -> type[AttentionBackend]:
            return Backend

    return {
        name for name, error in run_conformance(Suite()) if isinstance(error, (AssertionError, ValueError))
    }


def test_the_class_finds_nothing_in_the_definition() -> None:
    assert faults_of() == set()
