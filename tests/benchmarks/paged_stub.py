"""Other packages' kernels over pages in plain torch, as far as benchmarks/paged_calls.py calls them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from omni_attn.ops.reference import reference_attention
from omni_attn.testing.packages import fake_package


@contextmanager
def paged_peers(*, wrong: str = "") -> Iterator[list[str]]:
    """The stand-ins, and a list of the calls that they got; the one named `wrong` forgets the last key."""
    calls: list[str] = []

    def attend(name, query, key, value, table, lengths, starts, causal):
        calls.append(name)
        parts = []
        for row, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            count = int(lengths[row]) - (name == wrong)
            pages = table[row].long()
            keys, values = (x[pages].flatten(0, 1)[None, :count] for x in (key, value))
            parts.append(reference_attention(query[None, first:last], keys, values, causal=causal)[0][0])
        return torch.cat(parts).to(query.dtype)

    def with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, causal):
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        return attend("fa3", q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, causal)

    def varlen(
        q, k, v, *, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, page_table, causal
    ):  # fmt: skip
        assert max_seqlen_k == int(seqused_k.max())
        return attend("fa4", q, k, v, page_table, seqused_k, cu_seqlens_q, causal), None

    class Wrapper:
        def __init__(self, workspace, layout, **options):
            assert layout == "NHD" and workspace.dtype == torch.uint8
            self.name = f"flashinfer {options}"

        def plan(
            self, starts, boundaries, pages, last, heads, kv_heads, head_size, size, *, causal, **dtypes
        ):
            assert not starts.is_cuda and not boundaries.is_cuda and not last.is_cuda
            lengths = (boundaries.diff() - 1) * size + last
            self.planned = pages.view(len(last), -1), lengths, starts, causal

        def run(self, query, pages):
            return attend(self.name, query, *pages, *self.planned)

    class Decode(Wrapper):
        def plan(self, boundaries, *rest, **dtypes):
            starts = torch.arange(len(boundaries), dtype=torch.int32)
            super().plan(starts, boundaries, *rest, causal=True, **dtypes)

    with ExitStack() as stack:
        stack.enter_context(fake_package("flash_attn_interface", flash_attn_with_kvcache=with_kvcache))
        stack.enter_context(fake_package("flash_attn.cute", flash_attn_varlen_func=varlen))
        stack.enter_context(fake_package("flashinfer.prefill", BatchPrefillWithPagedKVCacheWrapper=Wrapper))
        stack.enter_context(fake_package("flashinfer.decode", BatchDecodeWithPagedKVCacheWrapper=Decode))
        yield calls
