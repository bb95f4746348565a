"""Attention over a paged KV cache: pages, their layout and size, and who holds which.

Importing this package loads nothing else; each public name is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_attn.backends.buffers import BufferPool
    from omni_attn.backends.paged import CommonAttentionMetadata
    from omni_attn.backends.paged_axes import along
    from omni_attn.backends.paged_split import Split, reorder_decodes_first, split_decodes_and_prefills
    from omni_attn.facts.kv_cache import AttentionCGSupport
    from omni_attn.kv_cache.batches import BatchDescriptor
    from omni_attn.kv_cache.block_tables import BlockTable
    from omni_attn.kv_cache.build import build_attention_metadata, make_step
    from omni_attn.kv_cache.capture import GraphRunner
    from omni_attn.kv_cache.cudagraph import CUDAGraphMode, LoweringStep, ModeDecision
    from omni_attn.kv_cache.groups import (
        AttentionGroup,
        cudagraph_supports,
        init_attention_groups,
    )
    from omni_attn.kv_cache.kernel_blocks import (
        BlockSizePlan,
        get_block_table_width,
        map_to_kernel_blocks,
        plan_block_sizes,
        select_common_block_size,
        split_pages,
    )
    from omni_attn.kv_cache.layers import PagedLayer, paged_layers
    from omni_attn.kv_cache.layouts import (
        KVCacheLayout,
        allocate_kv_cache,
        common_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from omni_attn.kv_cache.lowering import resolve_cudagraph_mode
    from omni_attn.kv_cache.pages import BlockPool
    from omni_attn.kv_cache.slots import check_slots
    from omni_attn.kv_cache.step import PagedCall, PagedStep
    from omni_attn.kv_cache.steps import StepInputs

_HOME = {
    "AttentionCGSupport": "omni_attn.facts.kv_cache",
    "AttentionGroup": "omni_attn.kv_cache.groups",
    "BatchDescriptor": "omni_attn.kv_cache.batches",
    "BlockPool": "omni_attn.kv_cache.pages",
    "BlockSizePlan": "omni_attn.kv_cache.kernel_blocks",
    "BlockTable": "omni_attn.kv_cache.block_tables",
    "BufferPool": "omni_attn.backends.buffers",
    "CUDAGraphMode": "omni_attn.kv_cache.cudagraph",
    "CommonAttentionMetadata": "omni_attn.backends.paged",
    "GraphRunner": "omni_attn.kv_cache.capture",
    "KVCacheLayout": "omni_attn.kv_cache.layouts",
    "LoweringStep": "omni_attn.kv_cache.cudagraph",
    "ModeDecision": "omni_attn.kv_cache.cudagraph",
    "PagedCall": "omni_attn.kv_cache.step",
    "PagedLayer": "omni_attn.kv_cache.layers",
    "PagedStep": "omni_attn.kv_cache.step",
    "Split": "omni_attn.backends.paged_split",
    "StepInputs": "omni_attn.kv_cache.steps",
    "allocate_kv_cache": "omni_attn.kv_cache.layouts",
    "along": "omni_attn.backends.paged_axes",
    "build_attention_metadata": "omni_attn.kv_cache.build",
    "check_slots": "omni_attn.kv_cache.slots",
    "common_kv_cache_layouts": "omni_attn.kv_cache.layouts",
    "cudagraph_supports": "omni_attn.kv_cache.groups",
    "get_block_table_width": "omni_attn.kv_cache.kernel_blocks",
    "init_attention_groups": "omni_attn.kv_cache.groups",
    "make_step": "omni_attn.kv_cache.build",
    "map_to_kernel_blocks": "omni_attn.kv_cache.kernel_blocks",
    "paged_layers": "omni_attn.kv_cache.layers",
    "plan_block_sizes": "omni_attn.kv_cache.kernel_blocks",
    "reorder_decodes_first": "omni_attn.backends.paged_split",
    "resolve_cudagraph_mode": "omni_attn.kv_cache.lowering",
    "resolve_kv_cache_layout": "omni_attn.kv_cache.layouts",
    "select_common_block_size": "omni_attn.kv_cache.kernel_blocks",
    "split_decodes_and_prefills": "omni_attn.backends.paged_split",
    "split_pages": "omni_attn.kv_cache.kernel_blocks",
}

__all__ = [
    "AttentionCGSupport",
    "AttentionGroup",
    "BatchDescriptor",
    "BlockPool",
    "BlockSizePlan",
    "BlockTable",
    "BufferPool",
    "CUDAGraphMode",
    "CommonAttentionMetadata",
    "GraphRunner",
    "KVCacheLayout",
    "LoweringStep",
    "ModeDecision",
    "PagedCall",
    "PagedLayer",
    "PagedStep",
    "Split",
    "StepInputs",
    "allocate_kv_cache",
    "along",
    "build_attention_metadata",
    "check_slots",
    "common_kv_cache_layouts",
    "cudagraph_supports",
    "get_block_table_width",
    "init_attention_groups",
    "make_step",
    "map_to_kernel_blocks",
    "paged_layers",
    "plan_block_sizes",
    "reorder_decodes_first",
    "resolve_cudagraph_mode",
    "resolve_kv_cache_layout",
    "select_common_block_size",
    "split_decodes_and_prefills",
    "split_pages",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(
            f"module 'omni_attn.kv_cache' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
