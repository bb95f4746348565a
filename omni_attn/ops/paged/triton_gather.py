"""The Triton kernel that brings the pages of each request together, for kernels that want long runs of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omni_attn.ops.layout import on_device

_ROWS = 32  # tokens of one program


@triton.jit
def gather_kernel(  # type: ignore[no-untyped-def]
    cache_ptr,
    out_ptr,
    lens_ptr,
    table_ptr,
    new_lens_ptr,
    new_table_ptr,
    stride_page,
    stride_kv,
    stride_place,
    stride_head,
    stride_table,
    P: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS tokens of one request and head, out [R, 2, G, TOKENS, D]; nothing behind a request's last token.

    The first program of each request writes its length, no more than TOKENS, and its page, which has its number.
    """
    head, request = tl.program_id(1), tl.program_id(2)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    length = tl.minimum(tl.load(lens_ptr + request), TOKENS)  # only the host's bound says that it fits
    if (tl.program_id(0) == 0) & (head == 0):
        tl.store(new_lens_ptr + request, length)
        tl.store(new_table_ptr + request, request)
    inside = token < length
    page = tl.load(table_ptr + request.to(tl.int64) * stride_table + token // P, mask=inside, other=0)
    source = page.to(tl.int64) * stride_page + (token % P).to(tl.int64) * stride_place
    at = cache_ptr + head.to(tl.int64) * stride_head + source[:, None] + channel[None, :]
    heads = tl.num_programs(1)
    first = (request * 2 * heads + head).to(tl.int64) * TOKENS
    to = out_ptr + (first + token)[:, None] * D + channel[None, :]
    tl.store(to, tl.load(at, mask=inside[:, None], other=0.0), mask=inside[:, None])
    to += heads.to(tl.int64) * TOKENS * D
    tl.store(to, tl.load(at + stride_kv, mask=inside[:, None], other=0.0), mask=inside[:, None])


def gather_requests(
    kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache with one page of `tokens` tokens for each request, [R, 2, tokens, G, D], its table [R, 1] and lengths.

    What lies behind a request's last token is whatever was in memory. Head by head in memory (HND). Of a request that
    is longer than it may be, the first `tokens` tokens are taken, so that nothing reads behind its page.

    Args:
        kv_cache: [N, 2, P, G, D], D a power of two.
        tokens: at least the longest request.
    """
    requests = seq_lens.shape[0]
    _, both, page_size, heads, size = kv_cache.shape
    gathered = kv_cache.new_empty(requests, both, heads, tokens, size)
    lengths, table = torch.empty_like(seq_lens), seq_lens.new_empty(requests, 1)
    with on_device(kv_cache):
        gather_kernel[(triton.cdiv(tokens, _ROWS), heads, requests)](
            kv_cache,
            gathered,
            seq_lens,
            block_table,
            lengths,
            table,
            *kv_cache.stride()[:4],
            block_table.stride(0),
            P=page_size,
            D=size,
            TOKENS=tokens,
            ROWS=_ROWS,
            num_warps=4,
        )
    return gathered.transpose(2, 3), table, lengths
