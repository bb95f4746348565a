"""TRITON_ATTN: our Triton kernels over a paged KV cache, on every GPU with Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import torch

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.optional_package import import_symbols
from omni_attn.backends.paged import CommonAttentionMetadata, PagedMetadataBuilder
from omni_attn.backends.paged_impl import PagedKernelImpl
from omni_attn.backends.triton_mla import FACTS as MLA_FACTS
from omni_attn.backends.triton_mla import TritonMLABuilder, TritonMLAImpl
from omni_attn.backends.triton_package import TRITON, TRITON_PACKAGES
from omni_attn.facts import (
    AttentionCGSupport,
    BackendFacts,
    CacheFacts,
    CapabilityRange,
    HeadSizes,
    KernelFacts,
    MultipleOf,
    Variant,
)
from omni_attn.facts.backend import BFLOAT16, FLOAT16, FLOAT32
from omni_attn.ops.operators import is_traced
from omni_attn.ops.paged.operators import attend_pages
from omni_attn.ops.paged.plan import Plan, plan_on
from omni_attn.ops.paged.write import write_kv_cache

SPLIT, INVARIANT = "split", "invariant"
"""Tiles and splits that fit the batch; or one tile without splits, for the same bits in any batch."""
_KERNEL = KernelFacts(
    device_kinds=frozenset({"cuda", "rocm", "xpu"}),
    capabilities=(CapabilityRange(minimum=(8, 0)),),
    packages=TRITON_PACKAGES,
    dtypes=frozenset({FLOAT16, BFLOAT16, FLOAT32}),
    head_sizes=HeadSizes(multiple_of=8, minimum=8, maximum=256),
    causal=True,
    gqa=True,
    packing=True,
    window=True,
    cudagraph=True,
    compile_mode="custom_op",
    cache=CacheFacts(
        block_sizes=(MultipleOf(base=1),),
        cache_dtypes=frozenset({"fp8_e4m3"}),
        causal_by_request=True,
        cudagraph=AttentionCGSupport.ALWAYS,
    ),
    tested_on=("sm_90 (H200)",),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class TritonMetadata:
    """M of TRITON_ATTN: what was stated, and how the kernel is cut for it. The kernel reads lengths on the device.

    Attributes:
        num_tokens: of all requests, with padding.
        max_query_len, max_seq_len: what the plans were made for.
        plan: of plan_step, from host numbers alone; wide_plan: for float32 queries.
        rest: see CommonAttentionMetadata.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor | None
    causal: bool | torch.Tensor
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    plan: Plan
    wide_plan: Plan


class TritonPagedBuilder(PagedMetadataBuilder):
    """Cuts a step into tiles and splits. A captured graph keeps the cut, and reads the lengths of each replay."""

    supports_update_block_table: ClassVar[bool] = True

    def build(self, common: CommonAttentionMetadata) -> TritonMetadata:
        """See PagedMetadataBuilder.build."""
        longest = common.max_seq_len
        if common.seq_lens_cpu is not None and common.num_reqs and not self._for_cudagraph:
            # Two bounds, and a plan may rely on its own: of lengths that the host states, the larger one.
            longest = max(longest, int(common.seq_lens_cpu.max()))
        return TritonMetadata(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            num_tokens=common.num_actual_tokens if common.num_reqs else 0,
            max_query_len=common.max_query_len,
            max_seq_len=longest,
            plan=self._plan(common, longest, 2),
            wide_plan=self._plan(common, longest, 4),
        )

    def _plan(self, common: CommonAttentionMetadata, max_seq_len: int, item_bytes: int) -> Plan:
        return plan_on(
            self.device,
            num_tokens=common.num_actual_tokens,
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=max_seq_len,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            item_bytes=item_bytes,
            page_size=self.kv_cache_spec.block_size,
            windowed=self.window is not None,
            invariant=self.variant == INVARIANT,
        )


class TritonPagedImpl(PagedKernelImpl):
    """One layer on our kernels."""

    backend: ClassVar[str] = "TRITON_ATTN"
    metadata_cls: ClassVar[type] = TritonMetadata

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        import_symbols(self.backend, TRITON)
        self._attend_pages = import_module("omni_attn.ops.paged.triton_attention").attend_pages

    def update_kv_cache(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See PagedAttentionImpl.update_kv_cache."""
        scales = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        write_kv_cache(key, value, kv_cache, slot_mapping, **scales, host_scales=self.host_scales)

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonMetadata, output: torch.Tensor
    ) -> None:
        """See PagedKernelImpl.attend; rows of tokens of no request hold anything."""
        count, causal = metadata.num_tokens, metadata.causal
        if not count:
            return
        tensors = (query[:count], kv_cache, output[:count])
        tables = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
        if is_traced(query):
            by_request = causal if isinstance(causal, torch.Tensor) else None
            attend_pages(
                *tensors,
                *tables,
                by_request,
                by_request is None and bool(causal),
                metadata.max_query_len,
                metadata.max_seq_len,
                *(self.window or (-1, -1)),
                self.softmax_scale,
                self.host_scales,
                self.window is not None,
                self.variant == INVARIANT,
            )
        else:
            query_start_loc, seq_lens, block_table = tables
            self._attend_pages(
                *tensors,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=block_table,
                causal=causal,
                window=self.window,
                softmax_scale=self.softmax_scale,
                plan=metadata.wide_plan if query.dtype == torch.float32 else metadata.plan,
                key_scale=self.key_scale,
                value_scale=self.value_scale,
            )


class TritonAttentionBackend(AttentionBackend):
    """Our own kernels over pages: torch and Triton, nothing else."""

    facts: ClassVar[BackendFacts] = BackendFacts.of(
        _KERNEL,
        summary="our Triton kernels over a paged KV cache",
        stateless=False,
        error="2.3e-3",
        paged=BackendFacts.of(
            _KERNEL,
            variants=(
                Variant(name=SPLIT, facts=_KERNEL),
                Variant(name=INVARIANT, facts=replace(_KERNEL, batch_invariant=True)),
            ),
        ),
        mla=MLA_FACTS,
    )

    @staticmethod
    def get_name() -> str:
        """TRITON_ATTN."""
        return "TRITON_ATTN"

    @staticmethod
    def get_paged_impl_cls() -> type[TritonPagedImpl]:
        """TritonPagedImpl."""
        return TritonPagedImpl

    @staticmethod
    def get_paged_builder_cls() -> type[TritonPagedBuilder]:
        """TritonPagedBuilder."""
        return TritonPagedBuilder

    @staticmethod
    def get_mla_impl_cls() -> type[TritonMLAImpl]:
        """TritonMLAImpl."""
        return TritonMLAImpl

    @staticmethod
    def get_mla_builder_cls() -> type[TritonMLABuilder]:
        """TritonMLABuilder."""
        return TritonMLABuilder
