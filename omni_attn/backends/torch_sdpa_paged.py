"""TORCH_SDPA over a paged KV cache: pages are brought together, then torch's own attention runs. The reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from omni_attn.backends.paged import CommonAttentionMetadata, PagedMetadataBuilder
from omni_attn.backends.paged_impl import PagedKernelImpl
from omni_attn.ops.masks import rows_without_key
from omni_attn.ops.paged.gather import gather_pages, page_mask
from omni_attn.ops.paged.write import write_kv_cache


@dataclass(frozen=True, eq=False, kw_only=True)
class GatheredMetadata:
    """M of TORCH_SDPA: queries of each request in a row of their own, as long as the longest.

    Attributes:
        block_table, slot_mapping, seq_lens: as stated.
        num_keys: most tokens of any request.
        mask: see page_mask; empty_rows: queries without a key.
        tokens: int64 [R, queries], which query stands there; any other one behind a request's last.
        places: int64 [T], where the output of each token stands in [R * queries]; None = in this order.
        behind: bool [T, 1, 1], tokens of no request.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor | None
    seq_lens: torch.Tensor
    num_keys: int
    mask: torch.Tensor
    empty_rows: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    behind: torch.Tensor


class TorchSDPAPagedBuilder(PagedMetadataBuilder):
    """Masks and rows of a step, without asking the device for a length."""

    supports_update_block_table: ClassVar[bool] = True

    def build(self, common: CommonAttentionMetadata) -> GatheredMetadata:
        """See PagedMetadataBuilder.build."""
        starts, device = common.query_start_loc, common.query_start_loc.device
        queries, tokens = max(1, common.max_query_len), common.num_actual_tokens
        # A captured graph states one bound for all of its page tables.
        keys = min(common.max_seq_len, common.block_table.shape[1] * self.kv_cache_spec.block_size)
        mask = page_mask(
            starts.diff(),
            common.seq_lens,
            (queries, keys),
            causal=common.causal,
            window=self.window,
        )
        token = torch.arange(tokens, device=device)
        request = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp(
            max=common.num_reqs - 1
        )
        rows = starts[:-1, None] + torch.arange(queries, device=device)
        place = request * queries + token - starts[request]
        return GatheredMetadata(
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
            seq_lens=common.seq_lens,
            num_keys=keys,
            mask=self.stage("mask", mask),
            empty_rows=self.stage("empty_rows", rows_without_key(mask)),
            tokens=self.stage("tokens", rows.clamp(max=max(0, tokens - 1))),
            places=self.stage("places", place.clamp(max=common.num_reqs * queries - 1)),
            behind=self.stage("behind", (token >= starts[-1])[:, None, None]),
        )


class TorchSDPAPagedImpl(PagedKernelImpl):
    """One layer on torch's dispatcher, over pages."""

    backend: ClassVar[str] = "TORCH_SDPA"
    metadata_cls: ClassVar[type] = GatheredMetadata

    def update_kv_cache(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See PagedAttentionImpl.update_kv_cache."""
        scales = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        write_kv_cache(key, value, kv_cache, slot_mapping, **scales, host_scales=self.host_scales)

    def attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: GatheredMetadata, output: torch.Tensor
    ) -> None:
        """See PagedKernelImpl.attend; tokens of no request give zeros."""
        count = metadata.places.shape[0]
        if not (count and metadata.num_keys and metadata.seq_lens.shape[0]):
            output.zero_()
            return
        pages = gather_pages(
            kv_cache, metadata.block_table, metadata.seq_lens, metadata.num_keys, query.dtype
        )
        keys, values = (x.transpose(1, 2) for x in pages)
        attended = F.scaled_dot_product_attention(
            query[metadata.tokens].transpose(1, 2),
            keys,
            values,
            attn_mask=metadata.mask,
            scale=self.softmax_scale * self.key_scale,
            enable_gqa=self.num_heads != self.num_kv_heads,
        ).masked_fill(metadata.empty_rows, 0.0)
        rows = attended.transpose(1, 2).flatten(0, 1)[metadata.places].masked_fill(metadata.behind, 0.0)
        output[:count] = rows if self.value_scale == 1.0 else rows * self.value_scale
