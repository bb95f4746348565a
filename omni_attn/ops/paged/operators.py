"""Attention over pages in Triton as one opaque operator, for torch.compile.

A plan's numbers would be guards of compiled code, and a step with other ones would be compiled anew: the operator gets
what the plan is made of, and makes it in its body, on the host.
"""

from __future__ import annotations

from importlib import import_module

import torch

from omni_attn.ops.paged.plan import plan_on
from omni_attn.ops.paged.write import scales_of


@torch.library.custom_op("omni_attn::triton_attend_pages", mutates_args=("output",))
def attend_pages(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    causal_by_request: torch.Tensor | None,
    causal: bool,
    max_query_len: int,
    max_seq_len: int,
    window_left: int,
    window_right: int,
    softmax_scale: float,
    host_scales: torch.Tensor | None,
    windowed: bool,
    invariant: bool,
) -> None:
    """See triton_attention.attend_pages.

    Args:
        causal_by_request: int32 [R]; None = `causal` holds for all of them.
        host_scales: of keys and values, see write_kv_cache.
        windowed: whether there is a window; invariant: see plan_step.
    """
    plan = plan_on(
        query.device,
        num_tokens=query.shape[0],
        num_reqs=seq_lens.shape[0],
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_heads=query.shape[1],
        num_kv_heads=kv_cache.shape[3],
        head_size=query.shape[2],
        item_bytes=4 if query.dtype == torch.float32 else 2,
        page_size=kv_cache.shape[2],
        windowed=windowed,
        invariant=invariant,
    )
    key_scale, value_scale = scales_of(host_scales, 2)
    import_module("omni_attn.ops.paged.triton_attention").attend_pages(
        query,
        kv_cache,
        output,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        causal=causal if causal_by_request is None else causal_by_request,
        window=(window_left, window_right) if windowed else None,
        softmax_scale=softmax_scale,
        plan=plan,
        key_scale=key_scale,
        value_scale=value_scale,
    )


@attend_pages.register_fake
def _(query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, *_: object) -> None:
    return None
