"""What latent attention needs of its sizes when it is built, and of its tensors when it is called."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from omni_attn.backends.mla import MLASizes
from omni_attn.facts import AttentionRequest, KVCacheSpec, MLAAttentionSpec
from omni_attn.kv_cache.paged_checks import pages_problem, wrong_dtype
from omni_attn.kv_cache.step import PagedCall


def mla_sizes(
    role: str,
    num_heads: int,
    kv_cache: MLAAttentionSpec,
    nope: int,
    value: int,
    kv_b_proj: nn.Linear,
    prefix: str,
) -> MLASizes:
    """The channels of a layer.

    Raises:
        ValueError: no prefix, another kind of cache, a size below 1, or a weight of another shape.
    """
    if not prefix or not isinstance(kv_cache, MLAAttentionSpec):
        lacking = "a prefix, by which its cache is found" if not prefix else "kv_cache, an MLAAttentionSpec"
        raise ValueError(f'role "{role}": MLAAttention needs {lacking}')
    if min(num_heads, nope, value) < 1:
        raise ValueError(
            f'role "{role}": num_heads={num_heads}, qk_nope_head_size={nope}, v_head_size={value}: each needs 1 or more'
        )
    rows, latent = num_heads * (nope + value), kv_cache.latent_size
    found = tuple(kv_b_proj.weight.shape)
    if found != (rows, latent) or kv_b_proj.bias is not None:
        extra = " and a bias" if kv_b_proj.bias is not None else ""
        raise ValueError(
            f'role "{role}": kv_b_proj has a weight {list(found)}{extra}, needs [{rows}, {latent}] without a bias: '
            f"{num_heads} heads of {nope} key and {value} value channels each, made of latents of {latent} (head_size="
            f"{kv_cache.head_size} of the cache without its rope_size={kv_cache.rope_size})"
        )
    return MLASizes(latent=latent, nope=nope, rope=kv_cache.rope_size, value=value)


def mla_call_problem(
    tensors: Mapping[str, torch.Tensor],
    call: PagedCall,
    sizes: MLASizes,
    spec: KVCacheSpec,
    request: AttentionRequest,
    dtype: torch.dtype,
) -> str | None:
    """Holds the tensors of a call against the layer and the step, see paged_checks.

    Args:
        tensors: query, latent, rope_key, output and kv_b_proj.weight by name.
        spec: with the page size that the kernels get.
        dtype: of the layer's tensors.
    """
    tokens, heads = tensors["query"].shape[0], request.num_heads
    shapes = {
        "query": [tokens, heads, sizes.nope + sizes.rope],
        "latent": [tokens, sizes.latent],
        "rope_key": [tokens, sizes.rope],
        "output": [tokens, heads, sizes.value],
    }
    for name, shape in shapes.items():
        if list(tensors[name].shape) != shape:
            return f"{name} has shape {tuple(tensors[name].shape)}, needs {shape}"
    for name in ("query", "latent", "rope_key", "kv_b_proj.weight"):
        if tensors[name].dtype != dtype:
            return wrong_dtype(name, tensors[name], dtype)
    slots = 0 if call.slot_mapping is None else call.slot_mapping.shape[0]
    if tokens < max(call.num_tokens, slots):
        return f"query has {tokens} tokens, and the step {max(call.num_tokens, slots)}: needs one row for each of them"
    return pages_problem(call.kv_cache, spec)
