"""Latent attention in torch, on any device: the definition that kernels are judged by.

Computed in float32, in float64 where that is what comes in. Nothing waits for a device. A query without a key gives
zeros, and a log-sum-exp of -inf.
"""

from __future__ import annotations

import torch

from omni_attn.ops.mla.bounds import RaggedBounds
from omni_attn.ops.mla.write import read_latents

_MOST_SCORES = 1 << 26
"""Scores that are computed at once."""


def attend_latents(
    query_THC: torch.Tensor,
    query_THE: torch.Tensor,
    kv_cache: torch.Tensor,
    *,
    row_requests: torch.Tensor,
    row_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_seq_len: int,
    softmax_scale: float,
    latent_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each absorbed query over the first rows of its request.

    Args:
        query_THC, query_THE: the two parts of each query.
        kv_cache: [N, P, C + E].
        row_requests, row_lens: int32 [T] on the device, request of each query, and how many of its rows it sees.
        block_table: int32 [R, W], pages in order; what lies behind those that are needed may be any number.
        max_seq_len: most rows that any query sees, known on the host.
        latent_scale: what the cache keeps times this is the latent.

    Returns:
        Latents [T, H, C], and float32 [H, T].
    """
    size, latent_size = kv_cache.shape[1], query_THC.shape[2]
    dtype = _wide(query_THC)
    width = min(block_table.shape[1], -(-max_seq_len // size))
    place = torch.arange(width * size, device=row_lens.device)
    outputs, lses = [], []
    step = max(1, _MOST_SCORES // max(1, width * size * (kv_cache.shape[2] + query_THC.shape[1])))
    for begin in range(0, query_THC.shape[0], step):
        rows = slice(begin, begin + step)
        seen = place < row_lens[rows, None]
        table = block_table[row_requests[rows].long()][:, :width]
        pages = table.repeat_interleave(size, dim=1).masked_fill(~seen, 0)
        kept = read_latents(kv_cache, pages, place % size, dtype, latent_scale)
        kept = kept.masked_fill(~seen[:, :, None], 0.0)  # a weight of zero does not silence a NaN
        query = torch.cat((query_THC[rows], query_THE[rows]), dim=2).to(dtype)
        scores = torch.einsum("thc,tsc->ths", query, kept) * softmax_scale
        weights, lse = _softmax(scores.masked_fill(~seen[:, None], float("-inf")))
        outputs.append(torch.einsum("ths,tsc->thc", weights, kept[..., :latent_size]))
        lses.append(lse)
    if not outputs:
        return torch.empty_like(query_THC), query_THC.new_empty(query_THC.shape[1::-1], dtype=torch.float32)
    return torch.cat(outputs).to(query_THC.dtype), torch.cat(lses).float().T.contiguous()


def attend_ragged(
    query_THD: torch.Tensor,
    key_SHK: torch.Tensor,
    rope_key_SE: torch.Tensor,
    value_SHV: torch.Tensor,
    bounds: RaggedBounds,
    *,
    causal: bool,
    softmax_scale: float,
    output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of each request over its own keys [key | rope], whose rope part all heads share.

    Args:
        query_THD: D = K + E; key_SHK, rope_key_SE, value_SHV: any strides.
        causal: bottom-right aligned in each request.
        output: [T, H, V] that is written; None = a new tensor.

    Returns:
        [T, H, V], and float32 [H, T].
    """
    dtype, (tokens, heads, _) = _wide(query_THD), query_THD.shape
    if output is None:
        output = query_THD.new_empty(tokens, heads, value_SHV.shape[2])
    output.zero_()
    lse_HT = query_THD.new_full((heads, tokens), float("-inf"), dtype=torch.float32)
    device = query_THD.device
    for request, (first, last, start, end) in enumerate(bounds.on_host()):
        count = end - start
        if first == last or not count:
            continue
        place = torch.arange(count, device=device)
        used = place < bounds.key_lens[request]
        unused = ~used[:, None, None]  # a weight of zero does not silence a NaN
        rope_key = rope_key_SE[start:end, None].expand(-1, heads, -1)
        key = torch.cat((key_SHK[start:end], rope_key), dim=2).to(dtype).masked_fill(unused, 0.0)
        value = value_SHV[start:end].to(dtype).masked_fill(unused, 0.0)
        step = max(1, _MOST_SCORES // (heads * count))
        for begin in range(first, last, step):
            rows = slice(begin, min(last, begin + step))
            seen = used[None]
            if causal:
                token = torch.arange(begin - last, rows.stop - last, device=device)
                seen = seen & (place[None] <= (bounds.key_lens[request] + token)[:, None])
            scores = torch.einsum("thd,shd->hts", query_THD[rows].to(dtype), key) * softmax_scale
            weights, lse_HT[:, rows] = _softmax(scores.masked_fill(~seen, float("-inf")))
            output[rows] = torch.einsum("hts,shv->thv", weights, value).to(output.dtype)
    return output, lse_HT


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and log-sum-exp over the last axis; without a finite score zeros and -inf."""
    lse = scores.logsumexp(-1)
    anchor = torch.where(lse == float("-inf"), 0.0, lse)
    return (scores - anchor[..., None]).exp(), lse


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
