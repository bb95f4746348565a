"""A step over a paged cache, made up: ragged requests, their pages in a cache full of NaN, and what must come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from omni_attn.backends.paged import NULL_BLOCK, PAD_SLOT, CommonAttentionMetadata
from omni_attn.facts.kv_cache import KVCacheSpec, kv_cache_shape
from omni_attn.ops.reference import reference_attention

_NAMES = {"fp8_e4m3": torch.float8_e4m3fn}
_UNUSED_PAGES = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class PagedScene:
    """Requests of one step, and the pages that they own.

    Attributes:
        query: [T, H, D] of all requests, one behind the other; key, value: their own tokens' [T, G, D].
        keys, values: of each request all tokens [L, G, D], earlier ones first.
        history_slots: int64, slots of the earlier tokens of all requests, in order.
        common: what a runner states.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    history_slots: torch.Tensor
    common: CommonAttentionMetadata
    spec: KVCacheSpec
    num_pages: int

    @property
    def slot_mapping(self) -> torch.Tensor:
        """Slots of this step's tokens."""
        assert self.common.slot_mapping is not None
        return self.common.slot_mapping

    @property
    def history(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value of the earlier tokens of all requests, as history_slots has them."""
        key, value = (
            torch.cat([x[: len(x) - count] for x, count in zip(parts, self.query_lens, strict=True)])
            for parts in (self.keys, self.values)
        )
        return key, value

    @property
    def query_lens(self) -> list[int]:
        """Query tokens of each request."""
        return self.common.query_start_loc_cpu.diff().tolist()

    def only(self, row: int) -> PagedScene:
        """One request alone, in the pages that it has."""
        first, last = self.common.query_start_loc_cpu[row : row + 2].tolist()
        earlier = [len(x) - count for x, count in zip(self.keys, self.query_lens, strict=True)]
        own = slice(sum(earlier[:row]), sum(earlier[: row + 1]))
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        common = replace(
            self.common,
            query_start_loc=starts.to(self.query.device),
            query_start_loc_cpu=starts,
            seq_lens=self.common.seq_lens[row : row + 1],
            seq_lens_cpu=None,
            num_reqs=1,
            num_actual_tokens=last - first,
            max_query_len=last - first,
            max_seq_len=len(self.keys[row]),
            block_table=self.common.block_table[row : row + 1],
            slot_mapping=self.slot_mapping[first:last],
        )
        return replace(
            self,
            query=self.query[first:last],
            key=self.key[first:last],
            value=self.value[first:last],
            keys=self.keys[row : row + 1],
            values=self.values[row : row + 1],
            history_slots=self.history_slots[own],
            common=common,
        )

    def with_gaps(self) -> PagedScene:
        """The same step, its tables and lists seen through larger ones: each second number belongs to nobody."""
        tables = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "causal")
        return replace(
            self,
            common=self.common.replace(
                **{
                    name: torch.stack((found, found.flip(0)), dim=-1)[..., 0]
                    for name in tables
                    if isinstance(found := getattr(self.common, name), torch.Tensor)
                }
            ),
        )

    def empty_cache(self, layout: str = "NHD") -> torch.Tensor:
        """NaN everywhere, in its logical shape."""
        shape = kv_cache_shape(self.num_pages, self.spec)
        dtype = _NAMES.get(self.spec.dtype) or getattr(torch, self.spec.dtype)
        pages = torch.full(shape, float("nan"), device=self.query.device).to(dtype)
        return pages if layout == "NHD" else pages.transpose(2, 3).contiguous().transpose(2, 3)

    def expected(
        self,
        *,
        causal: bool | Sequence[bool],
        window: tuple[int, int] | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """What REF gives, request by request, over what the cache's dtype keeps of its tokens: float64 [T, H, D]."""
        flags = [causal] * len(self.keys) if isinstance(causal, bool) else causal
        bounds = pairwise(self.common.query_start_loc_cpu.tolist())
        parts = [
            reference_attention(
                *(x[None] for x in (self.query[first:last], self.kept(key), self.kept(value))),
                causal=flag,
                window=window,
                softmax_scale=scale,
            )[0][0]
            for (first, last), key, value, flag in zip(bounds, self.keys, self.values, flags, strict=True)
        ]
        return torch.cat(parts)

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the dtype of the cache keeps of a tensor."""
        dtype = _NAMES.get(self.spec.dtype)
        return tensor if dtype is None else tensor.to(dtype).to(tensor.dtype)


def make_scene(
    lengths: Sequence[tuple[int, int]],
    *,
    spec: KVCacheSpec,
    num_heads: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    causal: bool | torch.Tensor = False,
    seed: int = 0,
    page_seed: int = 0,
    padded_reqs: int = 0,
    padded_tokens: int = 0,
    spare_columns: int = 2,
) -> PagedScene:
    """Requests of (query tokens, all tokens) each, with random tensors and pages in random order.

    Args:
        padded_reqs, padded_tokens: of a batch that a CUDA graph fixed; tokens behind the last request.
        spare_columns: of the block table, more than any request needs; what lies behind a request's pages names pages
            that nobody wrote.
    """
    numbers = torch.Generator().manual_seed(seed)
    heads, groups, size = num_heads, spec.num_kv_heads, spec.head_size
    lengths = [*lengths, *[(0, 0)] * padded_reqs]

    def random(count: int, num: int) -> torch.Tensor:
        return torch.randn(count, num, size, generator=numbers).to(device, dtype)

    keys = tuple(random(tokens, groups) for _, tokens in lengths)
    values = tuple(random(tokens, groups) for _, tokens in lengths)
    starts = [0, *accumulate(count for count, _ in lengths)]
    key, value = (
        torch.cat(
            [
                *(x[len(x) - q :] for x, (q, _) in zip(parts, lengths, strict=True)),
                random(padded_tokens, groups),
            ]
        )
        for parts in (keys, values)
    )
    needed = [
        spec.blocks_for(tokens) if spec.kind == "mla" else -(-tokens // spec.block_size)
        for _, tokens in lengths
    ]
    num_pages = 1 + sum(needed) + _UNUSED_PAGES
    order = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(page_seed))
    unused, own = order[:_UNUSED_PAGES], order[_UNUSED_PAGES:]
    table = unused[
        torch.randint(_UNUSED_PAGES, (len(lengths), max(needed) + spare_columns), generator=numbers)
    ]
    history, new = [], []
    for row, (count, tokens) in enumerate(lengths):
        pages = own[sum(needed[:row]) : sum(needed[: row + 1])]
        table[row, : len(pages)] = pages
        if row >= len(lengths) - padded_reqs:
            table[row] = NULL_BLOCK
        places = torch.arange(tokens)
        slots = pages[places // spec.block_size] * spec.block_size + places % spec.block_size
        history.append(slots[: tokens - count])
        new.append(slots[tokens - count :])
    loc = torch.tensor(starts, dtype=torch.int32)
    totals = torch.tensor([tokens for _, tokens in lengths], dtype=torch.int32)
    slots = torch.cat([*new, torch.full((padded_tokens,), PAD_SLOT)]).to(torch.int64)
    common = CommonAttentionMetadata(
        query_start_loc=loc.to(device),
        query_start_loc_cpu=loc,
        seq_lens=totals.to(device),
        seq_lens_cpu=totals,
        num_reqs=len(lengths),
        num_actual_tokens=starts[-1] + padded_tokens,
        max_query_len=max(count for count, _ in lengths),
        max_seq_len=max(tokens for _, tokens in lengths),
        block_table=table.to(device, torch.int32),
        slot_mapping=slots.to(device),
        causal=causal,
    )
    return PagedScene(
        query=random(starts[-1] + padded_tokens, heads),
        key=key,
        value=value,
        keys=keys,
        values=values,
        history_slots=torch.cat(history).to(device, torch.int64),
        common=common,
        spec=spec,
        num_pages=num_pages,
    )
