"""A stand-in for FlashAttention 3's function on a paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.sparse_listed import attend_rows


@contextmanager
def sparse_fa3_stand_in(log: CallLog) -> Iterator[None]:
    """Puts the module in place."""

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool = False,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
    ) -> torch.Tensor:
        """Packed sequences [T, H, D] over pages [pages, page, G, D], the form with a page table alone."""
        log.calls.append("flash_attn_with_kvcache")
        assert q.dtype == k_cache.dtype == v_cache.dtype, "one dtype"
        assert q.dim() == 3 and k_cache.dim() == v_cache.dim() == 4
        assert q.shape[-1] == k_cache.shape[-1] == v_cache.shape[-1], "one head size in this build"
        assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
        assert q.shape[1] == k_cache.shape[2] == v_cache.shape[2] == 1, (
            "this stand-in has one head a sequence"
        )
        assert all(x.stride(-1) == 1 for x in (q, k_cache, v_cache, page_table))
        sequences = page_table.shape[0]
        assert cache_seqlens.shape == (sequences,) and cu_seqlens_q.shape == (sequences + 1,)
        for x in (cache_seqlens, page_table, cu_seqlens_q):
            assert x.dtype == torch.int32, "tables and lengths: int32"
        assert not causal and num_splits == 1
        if q.is_meta:  # shapes alone
            return torch.empty_like(q)
        page = k_cache.shape[1]
        assert int(cache_seqlens.max()) <= page_table.shape[1] * page, "a sequence is longer than its table"
        bounds = cu_seqlens_q.tolist()
        assert bounds[0] == 0 and bounds[-1] == q.shape[0]
        key, value = k_cache.flatten(0, 2), v_cache.flatten(0, 2)
        output = torch.empty_like(q)
        for i, (start, end) in enumerate(pairwise(bounds)):
            assert end - start <= max_seqlen_q, "max_seqlen_q is too small"
            length = int(cache_seqlens[i])
            pages = page_table[i, : -(-length // page)].long()
            rows = (pages[:, None] * page + torch.arange(page)).flatten()[:length]
            output[start:end, 0] = attend_rows(q[start:end, 0], key[rows], value[rows], softmax_scale)
        return output

    with fake_package("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache):
        yield
