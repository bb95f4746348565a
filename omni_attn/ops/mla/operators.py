"""Latent attention in Triton as opaque operators, for torch.compile; plans are made in their bodies, on the host.

See omni_attn.ops.paged.operators.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from omni_attn.ops.mla.plan import plan_decode_on
from omni_attn.ops.paged.write import scales_of


@torch.library.custom_op("omni_attn::triton_attend_latents", mutates_args=())
def attend_latents(
    query: torch.Tensor,
    rope_query: torch.Tensor,
    kv_cache: torch.Tensor,
    row_requests: torch.Tensor,
    row_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seq_len: int,
    softmax_scale: float,
    host_scales: torch.Tensor | None,
) -> torch.Tensor:
    """See triton_attention.attend_latents."""
    rows, heads, size = query.shape
    attended: torch.Tensor = _kernels().attend_latents(
        query,
        rope_query,
        kv_cache,
        row_requests=row_requests,
        row_lens=row_lens,
        block_table=block_table,
        softmax_scale=softmax_scale,
        plan=plan_decode_on(
            query.device,
            num_rows=rows,
            max_seq_len=max_seq_len,
            heads=heads,
            latent=size,
            rope=rope_query.shape[2],
            item_bytes=query.element_size(),
        ),
        latent_scale=scales_of(host_scales, 1)[0],
    )
    return attended


@attend_latents.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("omni_attn::triton_attend_ragged", mutates_args=("output",))
def attend_ragged(
    output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    rope_key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    key_start_loc: torch.Tensor,
    key_lens: torch.Tensor,
    max_query_len: int,
    causal: bool,
    softmax_scale: float,
) -> torch.Tensor:
    """See triton_attention.attend_ragged_into."""
    lse_HT: torch.Tensor = _kernels().attend_ragged_into(
        output,
        query,
        key,
        rope_key,
        value,
        query_start_loc,
        key_start_loc,
        key_lens,
        max_query_len,
        causal=causal,
        softmax_scale=softmax_scale,
    )
    return lse_HT


@attend_ragged.register_fake
def _(output: torch.Tensor, query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


def _kernels() -> Any:
    return import_module("omni_attn.ops.mla.triton_attention")
