"""What FlashInfer wants to know of a step on the host: which queries, how many pages, how full the last one is.

Legend: R requests, W pages that a request may have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.ops.layout import without_waiting


@dataclass(frozen=True, eq=False, kw_only=True)
class HostStep:
    """One planned call. All but `indices` lie on the host, int32.

    Attributes:
        decode: every request has one query token, and token i is request i's.
        num_tokens: query tokens of the call.
        query_indptr: [R + 1]; page_indptr: [R + 1], of the requests' pages in `indices`.
        last_page_len: [R], tokens of the last page, 0 without one.
        indices: pages of all requests behind one another, on the device.
    """

    decode: bool
    num_tokens: int
    query_indptr: torch.Tensor
    page_indptr: torch.Tensor
    last_page_len: torch.Tensor
    indices: torch.Tensor


def host_step(common: CommonAttentionMetadata, block_size: int, *, fixed: bool) -> HostStep | None:
    """What to plan; None = no request has a query token.

    Args:
        fixed: a CUDA graph fixed the numbers of requests and tokens. Tokens of no request, which the kernels have no
            word for, are then those of one more request, which has no keys; else they are left out, as are requests
            without tokens.

    Raises:
        MetadataError: key lengths are not known on the host, or are more than the block table has pages for.
    """
    if common.seq_lens_cpu is None:
        raise MetadataError(
            "FLASHINFER_ATTN plans each step on the host, and the step says key lengths on the device only: state "
            "seq_lens_cpu, exactly"
        )
    queries, keys = common.query_start_loc_cpu.diff(), common.seq_lens_cpu
    rows = torch.arange(common.num_reqs)
    tokens = common.num_actual_tokens if fixed else int(common.query_start_loc_cpu[-1])
    decode = common.max_query_len == 1 and (not fixed or tokens == common.num_reqs)
    if fixed and decode:
        _check_rows(queries)
        queries = torch.ones_like(queries)
    elif fixed:
        behind = tokens - int(common.query_start_loc_cpu[-1])
        queries = torch.cat((queries, queries.new_tensor([behind])))
        keys = torch.cat((keys, keys.new_zeros(1)))
        rows = torch.arange(common.num_reqs + 1)
    else:
        used = queries > 0
        rows, queries, keys = rows[used], queries[used], keys[used]
        if not len(rows):
            return None
    pages = (keys + (block_size - 1)) // block_size
    most, width = int(pages.max()), common.block_table.shape[1]
    if most > width:
        raise MetadataError(
            f"FLASHINFER_ATTN: seq_lens_cpu says {int(keys.max())} keys, which is {most} pages of {block_size} tokens, "
            f"and the block table has {width} a request: state the exact lengths"
        )
    page_indptr = _sums(pages)
    return HostStep(
        decode=decode,
        num_tokens=tokens,
        query_indptr=_sums(queries),
        page_indptr=page_indptr,
        last_page_len=(keys - (pages - 1).clamp(min=0) * block_size).to(torch.int32),
        indices=_indices(common.block_table, rows, pages, page_indptr),
    )


def _indices(
    block_table: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, page_indptr: torch.Tensor
) -> torch.Tensor:
    """The pages of each row behind one another: int32 on the table's device."""
    if len(rows) == 1:
        return block_table[int(rows[0]), : int(pages[0])].contiguous()
    total = int(page_indptr[-1])
    within = torch.arange(total) - page_indptr[:-1].long().repeat_interleave(pages)
    at = rows.repeat_interleave(pages) * block_table.shape[1] + within
    return block_table.flatten()[without_waiting(at, block_table.device)]


def _sums(counts: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(len(counts) + 1, dtype=torch.int32)
    sums[1:] = counts.cumsum(0)
    return sums


def _check_rows(queries: torch.Tensor) -> None:
    real = int(queries.sum())
    if not bool((queries[:real] == 1).all()):
        raise MetadataError(
            f"FLASHINFER_ATTN: a CUDA graph of one token per request got {queries.tolist()} tokens: requests without a "
            "token lie behind all others"
        )
