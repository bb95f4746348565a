"""FLASHINFER_ATTN over a paged KV cache: the builder plans a step from host lengths, the layers of a group run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from omni_attn.backends.flashinfer_builder import window_left
from omni_attn.backends.flashinfer_paged_kernels import PagedWrappers, import_paged_wrappers
from omni_attn.backends.flashinfer_paged_plans import PagedPlan, attend_planned
from omni_attn.backends.flashinfer_paged_steps import HostStep, host_step
from omni_attn.backends.flashinfer_plans import shared_workspace
from omni_attn.backends.paged import (
    CommonAttentionMetadata,
    PagedMetadataBuilder,
    one_causality,
)
from omni_attn.backends.paged_impl import PagedKernelImpl
from omni_attn.errors import MetadataError
from omni_attn.ops.operators import is_traced
from omni_attn.ops.paged.write import write_kv_cache

_TENSOR_CORE_RATIO = 3
"""Query heads per kv head from which decode is faster on tensor cores; without them not all ratios have kernels."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FlashInferPagedMetadata:
    """M of FLASHINFER_ATTN over pages.

    Attributes:
        plan: the planned launch, None = there is no query token.
        slot_mapping: see CommonAttentionMetadata.
        num_tokens: query tokens of the launch.
    """

    plan: PagedPlan | None
    slot_mapping: torch.Tensor | None
    num_tokens: int


class FlashInferPagedBuilder(PagedMetadataBuilder):
    """Plans each step once for all layers of its group. Reads nothing back from the device."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._wrappers: PagedWrappers | None = None
        self._plans: dict[bool, list[PagedPlan]] = {}
        self._captured: dict[tuple[bool, int, int, int], PagedPlan] = {}

    def build(self, common: CommonAttentionMetadata) -> FlashInferPagedMetadata:
        """See PagedMetadataBuilder.build.

        Raises:
            MetadataError: the host does not know the lengths, or causal and non-causal requests lie in one batch.
        """
        causal = one_causality(self._label, common.causal)
        step = host_step(common, self.kv_cache_spec.block_size, fixed=self._for_cudagraph)
        if step is None:
            return FlashInferPagedMetadata(plan=None, slot_mapping=common.slot_mapping, num_tokens=0)
        arguments = self._arguments(step, causal)
        if self._for_cudagraph:
            plan = self._planned_for_graph(step, common, arguments)
        else:
            plan = self._free_plan(step.decode)
            plan.plan(self.device, **arguments)
        metadata = FlashInferPagedMetadata(
            plan=plan, slot_mapping=common.slot_mapping, num_tokens=step.num_tokens
        )
        plan.belongs_to(metadata)
        return metadata

    @property
    def _label(self) -> str:
        return f"FLASHINFER_ATTN ({self.variant})"

    def _arguments(self, step: HostStep, causal: bool) -> dict[str, Any]:
        left = window_left(self.window, causal)
        if left is None:
            raise MetadataError(
                f"{self._label} cannot limit a window on the right, found window={self.window}: its kernels limit the "
                "left side only; choose FLASH_ATTN, TRITON_ATTN or TORCH_SDPA for this role"
            )
        dtype = getattr(torch, self.kv_cache_spec.dtype)
        shared = {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "page_size": self.kv_cache_spec.block_size,
            "window_left": left,
            "sm_scale": self.softmax_scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        if step.decode:
            pages = {
                "indptr": step.page_indptr,
                "indices": step.indices,
                "last_page_len": step.last_page_len,
            }
            return {**pages, "head_dim": self.head_size, **shared}
        return {
            "qo_indptr": step.query_indptr,
            "paged_kv_indptr": step.page_indptr,
            "paged_kv_indices": step.indices,
            "paged_kv_last_page_len": step.last_page_len,
            "head_dim_qk": self.head_size,
            "causal": causal,
            **shared,
        }

    def _free_plan(self, decode: bool) -> PagedPlan:
        plans = self._plans.setdefault(decode, [])
        plan = next((plan for plan in plans if plan.is_free), None)
        if plan is None:
            plan = self._new_plan(decode)
            plans.append(plan)
        return plan

    def _planned_for_graph(
        self, step: HostStep, common: CommonAttentionMetadata, arguments: dict[str, Any]
    ) -> PagedPlan:
        """Planned in the buffers that the graph of this size reads."""
        pages = common.num_reqs * -(-common.max_seq_len // self.kv_cache_spec.block_size)
        size = (step.decode, common.num_reqs, common.num_actual_tokens, pages)
        plan = self._captured.get(size)
        if plan is not None:
            plan.plan_again(self.device, **arguments)
            return plan
        buffers = {
            "query": len(step.query_indptr),
            "indptr": len(step.page_indptr),
            "indices": max(1, pages),
            "last": len(step.last_page_len),
        }
        held = {
            name: torch.zeros(count, dtype=torch.int32, device=self.device) for name, count in buffers.items()
        }
        plan = self._captured[size] = self._new_plan(step.decode, held)
        plan.plan(self.device, **arguments)
        return plan

    def _new_plan(self, decode: bool, held: dict[str, torch.Tensor] | None = None) -> PagedPlan:
        return PagedPlan(self._wrapper(decode, held), narrow=self.variant != "fa3")

    def _wrapper(self, decode: bool, held: dict[str, torch.Tensor] | None = None) -> Any:
        if self._wrappers is None:
            self._wrappers = import_paged_wrappers(self.variant)
        workspace, graph = shared_workspace(self.device), held is not None
        held = held or {}
        if decode:
            return self._wrappers.decode(
                workspace,
                kv_layout="NHD",  # what the logical view has; strides tell where things lie
                use_cuda_graph=graph,
                use_tensor_cores=self.num_heads // self.num_kv_heads >= _TENSOR_CORE_RATIO,
                paged_kv_indptr_buffer=held.get("indptr"),
                paged_kv_indices_buffer=held.get("indices"),
                paged_kv_last_page_len_buffer=held.get("last"),
                backend="fa2",
            )
        return self._wrappers.prefill(
            workspace,
            kv_layout="NHD",
            use_cuda_graph=graph,
            qo_indptr_buf=held.get("query"),
            paged_kv_indptr_buf=held.get("indptr"),
            paged_kv_indices_buf=held.get("indices"),
            paged_kv_last_page_len_buf=held.get("last"),
            backend=self.variant or "fa2",
        )


class FlashInferPagedImpl(PagedKernelImpl):
    """One layer on a planned FlashInfer kernel over pages."""

    backend: ClassVar[str] = "FLASHINFER_ATTN"
    metadata_cls: ClassVar[type] = FlashInferPagedMetadata

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        import_paged_wrappers(self.variant)

    def update_kv_cache(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See PagedAttentionImpl.update_kv_cache."""
        write_kv_cache(key, value, kv_cache, slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashInferPagedMetadata,
        output: torch.Tensor,
    ) -> None:
        """See PagedKernelImpl.attend; rows of tokens of no request hold anything."""
        if metadata.plan is None:
            return
        rows, answered = query[: metadata.num_tokens], output[: metadata.num_tokens]
        if is_traced(query):
            attend_planned(rows, kv_cache, answered, metadata.plan.number)
        else:
            metadata.plan.attend(rows, kv_cache, answered)
