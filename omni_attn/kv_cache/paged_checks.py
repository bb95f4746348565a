"""What attention over pages of keys and values needs of its tensors when it is called.

Each function gives the problem as a text, None where there is none: the layer puts its own name in front. A name that
was handed in would be a constant of the compiled code, which could then serve no other layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from omni_attn.facts import AttentionRequest, KVCacheSpec
from omni_attn.facts.kv_cache import kv_cache_shape
from omni_attn.kv_cache.layouts import CACHE_DTYPES
from omni_attn.kv_cache.step import PagedCall


def paged_call_problem(
    tensors: Mapping[str, torch.Tensor | None],
    call: PagedCall,
    spec: KVCacheSpec,
    request: AttentionRequest,
    dtype: torch.dtype,
) -> str | None:
    """Holds the tensors of a call against the layer and the step.

    Args:
        tensors: query, key, value and output by name; None = the call has none.
        spec: with the page size that the kernels get.
        dtype: of the layer's tensors.
    """
    wanted = {
        "query": (request.num_heads, request.head_size),
        "key": (request.num_kv_heads, request.head_size),
        "value": (request.num_kv_heads, request.value_head_size),
        "output": (request.num_heads, request.value_head_size),
    }
    for name, (heads, size) in wanted.items():
        tensor = tensors[name]
        if tensor is None:
            continue
        if tensor.dim() != 3 or tensor.shape[1:] != (heads, size):
            return (
                f"{name} has shape {tuple(tensor.shape)}, the layer was built for {heads} heads of {size} channels: "
                f"needs [tokens, {heads}, {size}]"
            )
        if name != "output" and tensor.dtype != dtype:
            return wrong_dtype(name, tensor, dtype)
    query, output = tensors["query"], tensors["output"]
    if (tensors["key"] is None) != (tensors["value"] is None):
        return "key and value come together, or neither of them"
    if (
        query is not None
        and output is not None
        and (query.shape[0] < call.num_tokens or output.shape[0] != query.shape[0])
    ):
        return (
            f"query has {query.shape[0]} tokens, output {output.shape[0]}, and the step {call.num_tokens}: needs one "
            "row for each of them"
        )
    return pages_problem(call.kv_cache, spec)


def wrong_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """The problem of a tensor that has another dtype than the layer."""
    return f"{name} is {tensor.dtype}, the layer was built for {dtype}; state dtype= when it is built"


def pages_problem(kv_cache: torch.Tensor, spec: KVCacheSpec) -> str | None:
    """Holds a layer's pages against what it keeps."""
    pages = kv_cache_shape(1, spec)[1:]
    if kv_cache.shape[1:] != pages:
        return (
            f"its cache has shape {tuple(kv_cache.shape)}, needs [pages, {', '.join(map(str, pages))}]: hand over "
            "pages of its group's kernel_spec (split_pages)"
        )
    if kv_cache.dtype != CACHE_DTYPES[spec.dtype]:
        return (
            f"its cache holds {kv_cache.dtype}, and the layer keeps {spec.dtype}, which is "
            f"{CACHE_DTYPES[spec.dtype]}: allocate it with allocate_kv_cache"
        )
    return None


def unfit_slots(key: torch.Tensor | None, slots: torch.Tensor) -> str:
    """The problem of a step with more slots than the call brings keys."""
    given = "no key and value" if key is None else f"{key.shape[0]} keys"
    return (
        f"the step has slots for {slots.shape[0]} tokens, and the call brings {given}: state slot_mapping=None where "
        "nothing is written"
    )
