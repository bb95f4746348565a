"""Pages brought together: the keys and values of each request as dense tensors, in torch."""

from __future__ import annotations

import torch

from omni_attn.ops.paged.write import as_bytes


def gather_pages(
    kv_cache: torch.Tensor,
    block_table_RW: torch.Tensor,
    seq_lens_R: torch.Tensor,
    tokens: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value [R, tokens, G, D] in `dtype`; zeros behind a request's last token.

    Args:
        kv_cache: [N, 2, P, G, D].
        block_table_RW: pages in order; what lies behind those that a request needs may be any number.
        seq_lens_R: tokens of each request, on the device.
        tokens: most of any request, known on the host; at most what W pages hold.
    """
    size = kv_cache.shape[2]
    width = min(block_table_RW.shape[1], -(-tokens // size))
    first = torch.arange(width, device=seq_lens_R.device) * size
    pages = block_table_RW[:, :width].masked_fill(first >= seq_lens_R[:, None], 0)
    both = as_bytes(kv_cache)[pages].view(kv_cache.dtype).to(dtype)
    both = both.movedim(2, 0).flatten(2, 3)[:, :, :tokens]
    used = torch.arange(both.shape[2], device=seq_lens_R.device) < seq_lens_R[:, None]
    both = both.masked_fill(~used[None, :, :, None, None], 0.0)  # a weight of zero does not silence a NaN
    return both[0], both[1]


def page_mask(
    query_lens_R: torch.Tensor,
    seq_lens_R: torch.Tensor,
    lengths: tuple[int, int],
    *,
    causal: bool | torch.Tensor,
    window: tuple[int, int] | None,
) -> torch.Tensor:
    """Keep mask [R, 1, queries or 1, keys]: which keys each query of a request sees, aligned at the bottom right.

    Args:
        lengths: most queries and keys of any request, known on the host.
        causal: of all requests, or of each [R].
    """
    device = seq_lens_R.device
    key = torch.arange(lengths[1], device=device)[None, None]
    total = seq_lens_R[:, None, None]
    keep = key < total
    if causal is False and window is None:
        return keep[:, None]
    position = torch.arange(lengths[0], device=device)[None, :, None] + total - query_lens_R[:, None, None]
    if isinstance(causal, torch.Tensor):
        keep = keep & ((key <= position) | (causal == 0)[:, None, None])
    elif causal:
        keep = keep & (key <= position)
    left, right = window or (-1, -1)
    if left >= 0:
        keep = keep & (key >= position - left)
    if right >= 0:
        keep = keep & (key <= position + right)
    return keep[:, None]
