"""Latent attention in Triton: what launches the kernels of triton_kernels."""

from __future__ import annotations

import torch
import triton

from omni_attn.ops.block_sparse.triton_select import float32_products
from omni_attn.ops.layout import on_device, shared_memory, unit_stride
from omni_attn.ops.mla.bounds import RaggedBounds
from omni_attn.ops.mla.plan import LatentPlan, padded, prefill_tile
from omni_attn.ops.mla.triton_kernels import latent_kernel, ragged_kernel
from omni_attn.ops.paged.triton_attend import merge_splits_kernel
from omni_attn.ops.paged.write import FP8

_LOG2_E = 1.4426950408889634
_BITS_SCALE = 256.0
"""What the kernel reads of float8_e4m3fn is 2 ** -8 of it."""
_MERGED_ROWS = 4


def attend_latents(
    query_THC: torch.Tensor,
    query_THE: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    row_requests: torch.Tensor,
    row_lens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    plan: LatentPlan,
    latent_scale: float = 1.0,
) -> torch.Tensor:
    """Each absorbed query over the first rows of its request: [T, H, C]. See reference.attend_latents.

    Args:
        plan: of plan_decode, for these rows and at least these lengths.
    """
    query, rope = unit_stride(query_THC), unit_stride(query_THE)
    row_requests, row_lens = unit_stride(row_requests), unit_stride(row_lens)
    block_table = unit_stride(block_table)
    rows, heads, size = query.shape
    bits = kv_cache.dtype == FP8
    factor = (_BITS_SCALE if bits else 1.0) * latent_scale
    cache = kv_cache.view(torch.uint8) if bits else kv_cache
    output = query.new_empty(rows, heads, size)
    target, lse = output, query
    splits, tile = plan.splits, plan.tile
    if splits > 1:
        target = query.new_empty(splits, rows, heads, size, dtype=torch.float32)
        lse = query.new_empty(splits, rows, heads, dtype=torch.float32)
    with on_device(query):
        latent_kernel[(rows * triton.cdiv(heads, tile.rows), splits)](
            query,
            rope,
            cache,
            target,
            lse,
            row_requests,
            row_lens,
            block_table,
            *query.stride()[:2],
            *rope.stride()[:2],
            *cache.stride()[:2],
            block_table.stride(0),
            rows,
            heads,
            splits,
            softmax_scale * factor * _LOG2_E,
            factor,
            P=cache.shape[1],
            C=size,
            E=rope.shape[2],
            BLOCK_C=padded(size),
            BLOCK_E=padded(rope.shape[2]),
            BLOCK_H=tile.rows,
            BLOCK_N=tile.keys,
            SPLIT=splits > 1,
            BITS=bits,
            PRECISION=_precision(query),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        if splits > 1:
            merge_splits_kernel[(triton.cdiv(rows * heads, _MERGED_ROWS),)](
                target,
                lse,
                output,
                *output.stride()[:2],
                rows * heads,
                heads,
                splits,
                D=size,
                BLOCK_D=padded(size),
                ROWS=_MERGED_ROWS,
                num_warps=4,
            )
    return output


def attend_ragged(
    query_THD: torch.Tensor,
    key_SHK: torch.Tensor,
    rope_key_SE: torch.Tensor,
    value_SHV: torch.Tensor,
    bounds: RaggedBounds,
    *,
    causal: bool,
    softmax_scale: float,
    output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of each request over its own keys: [T, H, V], and float32 [H, T]. See reference.attend_ragged."""
    if output is None:
        output = query_THD.new_empty(*query_THD.shape[:2], value_SHV.shape[2])
    lse_HT = attend_ragged_into(
        output,
        query_THD,
        key_SHK,
        rope_key_SE,
        value_SHV,
        bounds.query_start_loc,
        bounds.key_start_loc,
        bounds.key_lens,
        bounds.max_query_len,
        causal=causal,
        softmax_scale=softmax_scale,
    )
    return output, lse_HT


def attend_ragged_into(
    output: torch.Tensor,
    query_THD: torch.Tensor,
    key_SHK: torch.Tensor,
    rope_key_SE: torch.Tensor,
    value_SHV: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor,
    key_lens: torch.Tensor,
    max_query_len: int,
    *,
    causal: bool,
    softmax_scale: float,
) -> torch.Tensor:
    """Writes attend_ragged's output [T, H, V], and gives its log-sum-exp [H, T]; for the rest see RaggedBounds."""
    query, key = unit_stride(query_THD), unit_stride(key_SHK)
    rope, value = unit_stride(rope_key_SE), unit_stride(value_SHV)
    tokens, heads, _ = query.shape
    nope, rope_size, size = key.shape[2], rope.shape[1], value.shape[2]
    written = output if output.stride(-1) == 1 else output.new_empty(output.shape)
    lse_HT = query.new_empty(heads, tokens, dtype=torch.float32)
    requests = key_lens.shape[0]
    # Room for the pipeline's own needs is left by the plan.
    memory = shared_memory(query.device)
    tile = prefill_tile(max_query_len, nope, rope_size, size, query.element_size(), memory)
    with on_device(query):
        ragged_kernel[(tokens // tile.rows + requests, heads)](
            query,
            key,
            rope,
            value,
            written,
            lse_HT,
            query_start_loc,
            key_start_loc,
            key_lens,
            *query.stride()[:2],
            *key.stride()[:2],
            rope.stride(0),
            *value.stride()[:2],
            *written.stride()[:2],
            lse_HT.stride(0),
            requests,
            softmax_scale * _LOG2_E,
            CAUSAL=causal,
            K=nope,
            E=rope_size,
            V=size,
            BLOCK_K=padded(nope),
            BLOCK_E=padded(rope_size),
            BLOCK_V=padded(size),
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            PRECISION=_precision(query),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
    if written is not output:
        output.copy_(written)
    return lse_HT


def _precision(tensor: torch.Tensor) -> str:
    return float32_products(tensor) if tensor.dtype == torch.float32 else "tf32"
