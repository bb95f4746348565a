"""Calls over a paged KV cache: sizes, tensors, pages in memory, and float64 rows to judge outputs by.

Legend: R requests, q query tokens of each, L keys of each, T = R q, H heads, G kv heads, D head size, N pages, P tokens
of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks.sampled import SampledRows
from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.facts.kv_cache import FullAttentionSpec
from omni_attn.kv_cache import allocate_kv_cache

ORDERS = ("shuffled", "consecutive")
"""How the pages of a request lie in memory."""
CHUNK = 4680
"""Three latent frames of 480 x 832, 1560 tokens each."""


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """One size: all requests are alike.

    Attributes:
        history: keys that a request had before this step.
        block_size: tokens of a page.
    """

    name: str
    reqs: int = 1
    query_len: int
    history: int
    heads: int
    kv_heads: int
    head_size: int = 128
    block_size: int
    causal: bool = False

    @property
    def keys(self) -> int:
        """Of each request, its new ones included."""
        return self.history + self.query_len

    @property
    def flops(self) -> float:
        """Of both products, 4 T L H D."""
        return 4.0 * self.reqs * self.query_len * self.keys * self.heads * self.head_size

    @property
    def cache_numbers(self) -> int:
        """Numbers of the keys and values that are read."""
        return 2 * self.reqs * self.keys * self.kv_heads * self.head_size

    def spec(self, dtype: torch.dtype) -> FullAttentionSpec:
        """What is kept per token."""
        return FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            dtype=str(dtype).removeprefix("torch."),
        )

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return (
            f"{self.name}: {self.reqs} x {self.query_len} new tokens over {self.history} earlier ones, {heads} heads "
            f"of {self.head_size}, pages of {self.block_size}"
        )


def video_case(history: int, block_size: int = 8) -> PagedCase:
    """A chunk of causal Wan 1.3B at 480p."""
    return PagedCase(
        name=f"chunk-{history}",
        query_len=CHUNK,
        history=history,
        heads=12,
        kv_heads=12,
        block_size=block_size,
    )


def decode_case(reqs: int = 64, context: int = 4096, block_size: int = 16) -> PagedCase:
    """One token of each request of a language model with grouped heads."""
    return PagedCase(
        name=f"decode-{reqs}",
        reqs=reqs,
        query_len=1,
        history=context - 1,
        heads=32,
        kv_heads=8,
        block_size=block_size,
        causal=True,
    )


# What a CPU runs.
TOY_CHUNK = PagedCase(
    name="toy-chunk", query_len=24, history=48, heads=2, kv_heads=2, head_size=16, block_size=8
)
TOY_DECODE = PagedCase(
    name="toy-decode", reqs=3, query_len=1, history=20, heads=4, kv_heads=2, head_size=16, block_size=8,
    causal=True,
)  # fmt: skip


class PagedInputs:
    """Seeded tensors of a case, its pages, and what a step over them looks like.

    Attributes:
        query: [T, H, D]; keys, values: [R, L, G, D].
        kv_cache: [N, 2, P, G, D] in NHD order, keys and values apart, filled; page 0 belongs to nobody.
        block_table: int32 [R, W], on the device and, as `block_table_cpu`, on the host.
        slots: int64 [T], where the new tokens lie.
        common: without slots: the cache holds the new tokens already.
    """

    def __init__(
        self, case: PagedCase, device: torch.device, dtype: torch.dtype, *, order: str, seed: int
    ) -> None:
        self.case = case
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype, generator=generator)

        self.query = random(case.reqs * case.query_len, case.heads, case.head_size)
        self.keys, self.values = (
            random(case.reqs, case.keys, case.kv_heads, case.head_size) for _ in range(2)
        )
        width = -(-case.keys // case.block_size)
        pages = 1 + torch.arange(case.reqs * width)
        if order == "shuffled":
            pages = pages[torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))]
        self.block_table_cpu = pages.view(case.reqs, width).int()
        self.block_table = self.block_table_cpu.to(device)
        self.spec = case.spec(dtype)
        self.kv_cache = allocate_kv_cache(self.spec, 1 + len(pages), "NHD", device)
        places = torch.arange(case.keys, device=device)
        page, place = self.block_table[:, places // case.block_size].long(), places % case.block_size
        for part, tensor in enumerate((self.keys, self.values)):
            self.kv_cache[page, part, place.expand_as(page)] = tensor
        self.slots = (page * case.block_size + place)[:, case.history :].flatten()
        self.starts_cpu = case.query_len * torch.arange(case.reqs + 1, dtype=torch.int32)
        self.lengths_cpu = torch.full((case.reqs,), case.keys, dtype=torch.int32)
        self.starts, self.lengths = self.starts_cpu.to(device), self.lengths_cpu.to(device)
        self.common = CommonAttentionMetadata(
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts_cpu,
            seq_lens=self.lengths,
            seq_lens_cpu=self.lengths_cpu,
            num_reqs=case.reqs,
            num_actual_tokens=len(self.query),
            max_query_len=case.query_len,
            max_seq_len=case.keys,
            block_table=self.block_table,
            causal=case.causal,
        )

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.case.head_size**-0.5)

    def error(self, output: torch.Tensor) -> float:
        """Relative Frobenius error of an output [T, H, D] on sampled rows against float64.

        Causal cases have one query each, which sees all keys.
        """
        return self._sampled.error(self._by_kv_head(output), self._sampled.dense[0])

    def _by_kv_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> [R, q * H / G, G, D]: the heads of a group as rows of their kv head."""
        case = self.case
        grouped = tensor.reshape(len(tensor), case.kv_heads, -1, case.head_size).transpose(1, 2)
        return grouped.reshape(case.reqs, -1, case.kv_heads, case.head_size)

    @cached_property
    def _sampled(self) -> SampledRows:
        assert not self.case.causal or self.case.query_len == 1
        return SampledRows(self._by_kv_head(self.query), self.keys, self.values, self.scale)
