"""TRITON_ATTN over a paged cache of latents: our Triton kernels."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import torch

from omni_attn.backends.abstract import foreign_metadata
from omni_attn.backends.mla import MLAImpl, MLAMetadata
from omni_attn.backends.mla_builder import MLAMetadataBuilder
from omni_attn.backends.optional_package import import_symbols
from omni_attn.backends.triton_package import TRITON, TRITON_PACKAGES
from omni_attn.facts import AttentionCGSupport, BackendFacts, CacheFacts, CapabilityRange, HeadSizes
from omni_attn.facts.backend import BFLOAT16, FLOAT16, FLOAT32
from omni_attn.ops.mla.bounds import RaggedBounds
from omni_attn.ops.mla.operators import attend_latents, attend_ragged
from omni_attn.ops.mla.plan import LatentPlan, plan_decode_on
from omni_attn.ops.operators import is_traced

FACTS = BackendFacts(
    summary="our Triton kernels over a paged cache of latents",
    device_kinds=frozenset({"cuda", "rocm", "xpu"}),
    capabilities=(CapabilityRange(minimum=(8, 0)),),
    packages=TRITON_PACKAGES,
    dtypes=frozenset({FLOAT16, BFLOAT16, FLOAT32}),
    # A program holds the whole latent of its heads: more than DeepSeek's 512 + 64 channels do not fit registers.
    head_sizes=HeadSizes(multiple_of=8, minimum=16, maximum=640),
    value_head_size=True,
    causal=True,
    gqa=True,
    packing=True,
    cudagraph=True,
    compile_mode="custom_op",
    cache=CacheFacts(
        cache_dtypes=frozenset({"fp8_e4m3"}),
        kinds=frozenset({"mla"}),
        cudagraph=AttentionCGSupport.UNIFORM_BATCH,
    ),
    tested_on=("sm_90 (H200)",),
)


class TritonMLABuilder(MLAMetadataBuilder):
    """Cuts the decodes of a step into tiles and splits as well."""

    def plan_decode(self, num_rows: int, max_seq_len: int) -> dict[int, LatentPlan]:
        """Bytes of a query's number -> the plan."""
        return {
            item_bytes: plan_decode_on(
                self.device,
                num_rows=num_rows,
                max_seq_len=max_seq_len,
                heads=self.num_heads,
                latent=self.sizes.latent,
                rope=self.sizes.rope,
                item_bytes=item_bytes,
            )
            for item_bytes in (2, 4)
        }


class TritonMLAImpl(MLAImpl):
    """One layer on our kernels."""

    backend: ClassVar[str] = "TRITON_ATTN"

    def __init__(self, **geometry: Any) -> None:
        super().__init__(**geometry)
        import_symbols(self.backend, TRITON)
        self._kernels = import_module("omni_attn.ops.mla.triton_attention")

    def forward_mqa(
        self, query: tuple[torch.Tensor, torch.Tensor], kv_cache: torch.Tensor, metadata: MLAMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See MLAImpl.forward_mqa; gives no log-sum-exp."""
        rows = metadata.decode
        if rows is None or rows.plan is None:
            raise foreign_metadata(self, metadata, MLAMetadata)
        if is_traced(query[0]):
            where = (rows.row_requests, rows.row_lens, rows.block_table, rows.max_seq_len)
            return attend_latents(*query, kv_cache, *where, self.softmax_scale, self.host_scales), None
        latents: torch.Tensor = self._kernels.attend_latents(
            *query,
            kv_cache,
            row_requests=rows.row_requests,
            row_lens=rows.row_lens,
            block_table=rows.block_table,
            softmax_scale=self.softmax_scale,
            plan=rows.plan[query[0].element_size()],
            latent_scale=self.latent_scale,
        )
        return latents, None

    def attend_ragged(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        rope_key: torch.Tensor,
        value: torch.Tensor,
        bounds: RaggedBounds,
        *,
        causal: bool,
        output: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See MLAImpl.attend_ragged."""
        if is_traced(query):
            if output is None:
                output = query.new_empty(*query.shape[:2], value.shape[2])
            tables = (bounds.query_start_loc, bounds.key_start_loc, bounds.key_lens, bounds.max_query_len)
            tensors = (query, key, rope_key, value)
            return output, attend_ragged(output, *tensors, *tables, causal, self.softmax_scale)
        attended: tuple[torch.Tensor, torch.Tensor] = self._kernels.attend_ragged(
            query,
            key,
            rope_key,
            value,
            bounds,
            causal=causal,
            softmax_scale=self.softmax_scale,
            output=output,
        )
        return attended
