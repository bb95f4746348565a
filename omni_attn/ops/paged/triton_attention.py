"""Attention over pages in Triton: what launches the kernels of triton_attend."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from omni_attn.ops.block_sparse.triton_select import float32_products
from omni_attn.ops.layout import INT32_MAX, on_device, unit_stride
from omni_attn.ops.paged.plan import Plan
from omni_attn.ops.paged.triton_attend import attend_pages_kernel, merge_splits_kernel
from omni_attn.ops.paged.triton_gather import gather_requests
from omni_attn.ops.paged.write import FP8

_LOG2_E = 1.4426950408889634
_BITS_SCALE = 256.0
"""What the kernel reads of float8_e4m3fn is 2 ** -8 of it."""
_MERGED_ROWS = 8


def attend_pages(
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    output_THD: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    causal: bool | torch.Tensor,
    window: tuple[int, int] | None,
    softmax_scale: float,
    plan: Plan,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Writes attention of the requests' queries over their pages into output; that of tokens of no request holds
    anything.

    Args:
        query_THD, output_THD: any strides, half or single precision.
        kv_cache: [N, 2, P, G, D] of query's dtype or float8_e4m3fn, dense in D.
        query_start_loc, seq_lens, block_table, causal: see CommonAttentionMetadata; int32.
        plan: of plan_step, for these tokens, requests and at least these lengths.
    """
    # Parts of larger tables have gaps between their numbers, which the kernels would read as if there were none.
    query_start_loc, seq_lens = unit_stride(query_start_loc), unit_stride(seq_lens)
    block_table = unit_stride(block_table)
    if plan.gathered and _gathers(kv_cache):
        kv_cache, block_table, seq_lens = gather_requests(kv_cache, block_table, seq_lens, plan.gathered)
    query = unit_stride(query_THD)
    tokens, heads, size = query.shape
    page_size, groups = kv_cache.shape[2:4]
    tile, splits = plan.tile, plan.splits
    left, right = window or (-1, -1)
    bits = kv_cache.dtype == FP8
    factor = _BITS_SCALE if bits else 1.0
    cache, block_d = kv_cache.view(torch.uint8) if bits else kv_cache, max(16, triton.next_power_of_2(size))
    rows = _page_rows(cache, tile.block_n) if size == block_d and not bits else None
    written = output_THD if output_THD.stride(-1) == 1 else output_THD.new_empty(output_THD.shape)
    target, lse = written, query
    if splits > 1:
        target = query.new_empty(splits, tokens, heads, size, dtype=torch.float32)
        lse = query.new_empty(splits, tokens, heads, dtype=torch.float32)
    with on_device(query):
        attend_pages_kernel[(plan.num_tiles, groups, splits)](
            query,
            cache,
            cache if rows is None else rows[0],
            target,
            lse,
            query_start_loc,
            seq_lens,
            block_table,
            unit_stride(causal) if isinstance(causal, torch.Tensor) else seq_lens,
            *query.stride()[:2],
            *target.stride()[-3:-1],
            target.stride(0) if splits > 1 else 0,
            *cache.stride()[:4],
            block_table.stride(0),
            *((0, 0, 0, 0) if rows is None else rows[1:]),
            tokens,
            seq_lens.shape[0],
            plan.tiles_each,
            splits,
            softmax_scale * key_scale * factor * _LOG2_E,
            value_scale * factor,
            CAUSAL=2 if isinstance(causal, torch.Tensor) else int(causal),
            LEFT=left,
            RIGHT=right,
            RATIO=heads // groups,
            P=page_size,
            D=size,
            BLOCK_D=block_d,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            SPLIT=splits > 1,
            EVEN=plan.tiles_each > 0,
            BITS=bits,
            PRECISION=float32_products(query) if query.dtype == torch.float32 else "tf32",
            TMA=rows is not None,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        if splits > 1:
            merge_splits_kernel[(triton.cdiv(tokens * heads, _MERGED_ROWS),)](
                target,
                lse,
                written,
                *written.stride()[:2],
                tokens * heads,
                heads,
                splits,
                D=size,
                BLOCK_D=block_d,
                ROWS=_MERGED_ROWS,
                num_warps=4,
            )
    if written is not output_THD:
        output_THD.copy_(written)


def _gathers(cache: torch.Tensor) -> bool:
    """Whether tensor memory can fetch this cache's rows once they lie together."""
    size = cache.shape[-1]
    half = cache.dtype in (torch.float16, torch.bfloat16)
    on_gpu = cache.device.type == "cuda" and _has_tensor_memory(cache.device)
    return on_gpu and half and size >= 16 and size == triton.next_power_of_2(size)


def _page_rows(cache: torch.Tensor, block_n: int) -> tuple[Any, int, int, int, int] | None:
    """A tensor-memory descriptor over all pages, and where page, value, head (rows, then columns) lie in it.

    None where the GPU has none, or where a block of keys is not whole inside a page of a dense cache.
    """
    _, both, page_size, groups, size = cache.shape
    if cache.device.type != "cuda" or page_size % block_n or not _has_tensor_memory(cache.device):
        return None
    if cache.is_contiguous():  # NHD
        rows, where = cache.view(-1, groups * size), (both * page_size, page_size, 0, size)
    elif cache.transpose(2, 3).is_contiguous():  # HND
        rows = cache.transpose(2, 3).view(-1, size)
        where = (both * groups * page_size, groups * page_size, page_size, 0)
    else:
        return None
    if rows.shape[0] > INT32_MAX or rows.data_ptr() % 16:  # as tensor memory counts and finds rows
        return None
    return TensorDescriptor.from_tensor(rows, [block_n, size]), *where


@lru_cache(maxsize=16)
def _has_tensor_memory(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
