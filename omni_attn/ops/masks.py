"""Mask tensors. B batch, H heads, S sequence (q query, k key); bool masks keep where True."""

from __future__ import annotations

import torch


def position_mask(
    num_queries: int,
    num_keys: int,
    *,
    causal: bool,
    window: tuple[int, int] | None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Keep mask [Sq, Sk] of causal and windowed attention, aligned at the bottom right.

    Query i stands at position i + (Sk - Sq). Causal keeps keys up to it; a window (left, right) keeps keys from
    position - left to position + right, -1 meaning unlimited.
    """
    position = torch.arange(num_queries, device=device)[:, None] + (num_keys - num_queries)
    key = torch.arange(num_keys, device=device)[None, :]
    return _in_sight(position, key, causal, window)


def sequence_of(cu_seqlens: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Of each token the sequence, whose boundaries [N + 1] begin with 0; N behind the last one.

    All boundaries are searched, since torch's compiler searches no part of a tensor that it makes itself.
    """
    return torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1


def document_mask(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    lengths: tuple[int, int],
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Keep mask [Sq, Sk] of packed sequences: a query sees keys of its own sequence, each aligned by itself.

    Boundaries are int32 [N + 1] on the device and stay there. Tokens behind the last boundary see nothing.
    """
    starts_q, ends_q = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    starts_k, ends_k = cu_seqlens_k[:-1], cu_seqlens_k[1:]
    token_q = torch.arange(lengths[0], device=ends_q.device)
    token_k = torch.arange(lengths[1], device=ends_k.device)
    document_q, document_k = sequence_of(cu_seqlens_q, token_q), sequence_of(cu_seqlens_k, token_k)
    last = ends_q.numel() - 1
    own_q, own_k = document_q.clamp(max=last), document_k.clamp(max=last)
    shift = (ends_k - starts_k)[own_q] - (ends_q - starts_q)[own_q]
    position = (token_q - starts_q[own_q] + shift)[:, None]
    key = (token_k - starts_k[own_k])[None, :]
    same = (document_q[:, None] == document_k[None, :]) & (document_k <= last)[None, :]
    return same & _in_sight(position, key, causal, window)


def behind_last(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """True for the packed tokens behind the last boundary, which belong to no sequence: [1, T, 1, 1].

    Boundaries are int32 [N + 1] on the device and stay there.
    """
    token = torch.arange(length, device=cu_seqlens.device)
    return (token >= cu_seqlens[-1])[None, :, None, None]


def _in_sight(
    position: torch.Tensor, key: torch.Tensor, causal: bool, window: tuple[int, int] | None
) -> torch.Tensor:
    left, right = window or (-1, -1)
    keep = torch.ones(position.shape[0], key.shape[1], dtype=torch.bool, device=position.device)
    if causal:
        keep &= key <= position
    if left >= 0:
        keep &= key >= position - left
    if right >= 0:
        keep &= key <= position + right
    return keep


def combine_masks(mask: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """A mask (bool, or float to add) that also hides what the bool mask `keep` hides."""
    return mask & keep if mask.dtype == torch.bool else mask.masked_fill(~keep, float("-inf"))


def rows_without_key(mask: torch.Tensor) -> torch.Tensor:
    """True for the query rows of a [..., Sq, Sk] mask that see no key at all: [..., Sq, 1]."""
    hidden = ~mask if mask.dtype == torch.bool else mask == float("-inf")
    return hidden.all(-1, keepdim=True)


def lowest(dtype: torch.dtype) -> float:
    """The lowest number a kernel can add to scores: half of the dtype's own, since kernels scale scores by log2(e)."""
    return torch.finfo(dtype).min / 2


def keep_finite(mask: torch.Tensor) -> torch.Tensor:
    """A float mask whose finite values stay finite inside kernels; -inf stays as it is."""
    return torch.where(mask == float("-inf"), mask, mask.clamp(min=lowest(mask.dtype)))


# A row whose highest score lies below _FAR is moved; below _ABSORBING it hides the scores themselves even in float64,
# and moves to _BASE, a power of two that still absorbs them in float32 and that no scaling rounds.
_FAR, _ABSORBING, _BASE = -1e6, -1e17, -(2.0**56)


def lift_hidden_rows(
    bias: torch.Tensor, keep: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A float mask [..., Sq, Sk] without rows of huge negative numbers alone, and what was taken off, [..., Sq, 1].

    A softmax does not change when a row is shifted. Kernels scale scores by log2(e) and take the row's maximum off;
    where that is one fused step, such a row keeps a rounding error of its own size, whose power of two is infinite.
    `keep` [Sq, Sk] tells what else hides keys. Rows without any key stay as they are.
    """
    seen = bias if keep is None else bias.masked_fill(~keep, float("-inf"))
    highest = seen.amax(dim=-1, keepdim=True)
    near = (highest > _FAR) | (highest == float("-inf"))
    highest = highest.masked_fill(near, 0.0)
    base = torch.where(highest < _ABSORBING, _BASE, 0.0).to(bias.dtype)
    return (bias - highest) + base, highest - base


def as_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float mask in another dtype; large finite values stay finite, so that they keep their meaning."""
    if torch.finfo(mask.dtype).min >= torch.finfo(dtype).min:
        return mask.to(dtype)
    converted = mask.to(dtype)
    return torch.where(mask == float("-inf"), converted, converted.clamp(min=lowest(dtype)))
