"""Attention over keys in two parts, from the attention over each part and its log-sum-exp.

With m = max(a, b) of the parts' log-sum-exps and weights exp(a - m), exp(b - m), the output is the weighted mean of the
parts' outputs, and the whole's log-sum-exp m + log of the sum of the weights. Legend: T query tokens, H heads, D value
channels.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from omni_attn.errors import MetadataError
from omni_attn.ops.operators import is_traced


def merge_attn_states(
    first_THD: torch.Tensor,
    first_lse_HT: torch.Tensor,
    second_THD: torch.Tensor,
    second_lse_HT: torch.Tensor,
    output_THD: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys of two parts. Computed in float32 and rounded once.

    A part without keys has a log-sum-exp of -inf, and its output, NaN or not, does not count; +inf counts as -inf. A
    row without a key in either part is zeros, with -inf. Differentiable, by torch's operators, where `output_THD` is
    not one of the parts.

    Args:
        first_THD, second_THD: outputs of the parts.
        first_lse_HT, second_lse_HT: float32 log-sum-exps, natural log (a base-2 one times ln 2).
        output_THD: what is written, and may be one of the parts; None = a new tensor in the first part's dtype.

    Returns:
        [T, H, D], and float32 [H, T].

    Raises:
        MetadataError: shapes or dtypes do not fit.
    """
    tokens, heads, _ = first_THD.shape
    if second_THD.shape != first_THD.shape or (
        output_THD is not None and output_THD.shape != first_THD.shape
    ):
        given = second_THD if output_THD is None or second_THD.shape != first_THD.shape else output_THD
        raise MetadataError(
            f"merging attention outputs of shapes {tuple(first_THD.shape)} and {tuple(given.shape)}: they have to be "
            "equal"
        )
    for lse in (first_lse_HT, second_lse_HT):
        if lse.shape != (heads, tokens) or lse.dtype != torch.float32:
            raise MetadataError(
                f"merging outputs of {tokens} tokens and {heads} heads with a log-sum-exp of shape {tuple(lse.shape)}, "
                f"{lse.dtype}: needs torch.float32 [{heads}, {tokens}]"
            )
    if output_THD is None:
        output_THD = first_THD.new_empty(first_THD.shape)
    states = (first_THD, first_lse_HT, second_THD, second_lse_HT)
    asks_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states)
    kernels = None if asks_gradients else _kernels(first_THD)
    merge = _merge_in_torch if kernels is None else kernels.merge_states
    return output_THD, merge(*states, output_THD)


def _merge_in_torch(
    first_THD: torch.Tensor,
    first_lse_HT: torch.Tensor,
    second_THD: torch.Tensor,
    second_lse_HT: torch.Tensor,
    output_THD: torch.Tensor,
) -> torch.Tensor:
    lses = torch.stack((first_lse_HT, second_lse_HT))
    lses = torch.where(lses == float("inf"), float("-inf"), lses)
    most_HT = lses.detach().amax(0)  # any anchor gives the same result, so it needs no gradient
    empty_HT = most_HT == float("-inf")
    anchor_HT = torch.where(empty_HT, 0.0, most_HT)
    weights = torch.exp(lses - anchor_HT)
    total_HT = torch.where(empty_HT, 1.0, weights.sum(0))
    shares = (weights / total_HT).transpose(1, 2).unsqueeze(-1)
    # A part that does not count may hold anything, and 0 * NaN is not 0, forwards or backwards.
    parts = [
        torch.where(share != 0, part.float(), 0.0) * share
        for share, part in zip(shares, (first_THD, second_THD), strict=True)
    ]
    output_THD.copy_(parts[0] + parts[1])
    return torch.where(empty_HT, float("-inf"), anchor_HT + torch.log(total_HT))


def _kernels(output: torch.Tensor) -> Any | None:
    """The module of the Triton kernel; None where torch's operators are used instead."""
    if output.device.type not in ("cuda", "xpu") or is_traced(output):
        return None
    return _triton_module()


@lru_cache(maxsize=1)
def _triton_module() -> Any | None:
    return None if find_spec("triton") is None else import_module("omni_attn.ops.triton_merge_state")
