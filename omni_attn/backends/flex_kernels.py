"""torch's flex_attention: one traceable function, and how eager code gets it compiled.

flex_attention is a kernel only where it is compiled; called as it is, it makes the whole score matrix. torch.compile
counts recompilations per function and gives up at `torch._dynamo.config.recompile_limit`, 8 by default, so a process
that sees many shapes needs more than one function. Here each kind of call has its own, compiled for its exact shapes
(`dynamic=False`: measured faster, and no length stands for another), with fullgraph=True, which makes what torch cannot
compile an error and never a silent return to the score matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from omni_attn.backends.flex_blocks import index_steps
from omni_attn.backends.optional_package import import_symbols
from omni_attn.backends.triton_package import TRITON

#: Kinds of call that stay compiled; the one that was not used for longest is dropped.
MAX_COMPILED = 256


# One of its overloads fits whichever way it is called below; which one is not known to a type checker.
_flex_attention: Callable[..., Any] = flex_attention


def require_triton(label: str = "FLEX_ATTN") -> None:
    """Imports Triton, which torch compiles flex_attention to; `label` names the backend in the error text.

    Raises:
        BackendImportError: it is missing, broken, or no compiler.
    """
    import_symbols(label, TRITON)


def attend(
    query_BSHD: torch.Tensor,
    key_BSGD: torch.Tensor,
    value_BSGD: torch.Tensor,
    block_mask: BlockMask | None,
    bias: torch.Tensor | None,
    unused_keys: torch.Tensor | None,
    softmax_scale: float,
    with_lse: bool,
) -> Any:
    """Output [B, Sq, H, Dv], contiguous; with_lse a tuple of it and the log-sum-exp [B, H, Sq].

    Args:
        bias: float [B|1, H|1, Sq|1, Sk], added to the scores.
        unused_keys: bool [1, T, 1, 1], True for values that may be NaN: weight 0 times NaN would be NaN.
    """
    if unused_keys is not None:
        value_BSGD = value_BSGD.masked_fill(unused_keys, 0.0)
    output = _flex_attention(
        query_BSHD.transpose(1, 2),
        key_BSGD.transpose(1, 2),
        value_BSGD.transpose(1, 2),
        score_mod=None if bias is None else _adding(bias),
        block_mask=block_mask,
        scale=softmax_scale,
        enable_gqa=query_BSHD.shape[2] != key_BSGD.shape[2],
        kernel_options=_kernel_options(query_BSHD.shape[-1], value_BSGD.shape[-1]),
        return_aux=AuxRequest(lse=True) if with_lse else None,
    )
    if with_lse:
        return output[0].transpose(1, 2).contiguous(), output[1].lse
    return output.transpose(1, 2).contiguous()


def attend_blocks(
    query_BHRD: torch.Tensor,
    key_BGRD: torch.Tensor,
    value_BGRD: torch.Tensor,
    block_mask: BlockMask,
    tile: int,
    softmax_scale: float,
) -> Any:
    """Output [B, H, R, Dv] of rows that lie head by head; `tile`: rows of the map's tiles, 64 or 128."""
    options = _kernel_options(query_BHRD.shape[-1], value_BGRD.shape[-1])
    if tile < 128:
        narrow = max(query_BHRD.shape[-1], value_BGRD.shape[-1]) > 128 or query_BHRD.dtype == torch.float32
        options |= {"fwd_BLOCK_M": tile, "fwd_BLOCK_N": 32 if narrow else tile}
    return _flex_attention(
        query_BHRD,
        key_BGRD,
        value_BGRD,
        block_mask=block_mask,
        scale=softmax_scale,
        enable_gqa=query_BHRD.shape[1] != key_BGRD.shape[1],
        kernel_options=options,
    )


def compiled_attend(kind: Hashable, function: Callable[..., Any] = attend) -> Callable[..., Any]:
    """`function`, compiled for calls of one kind: whatever their shapes and masks have in common."""
    return _compiled(kind, function)


@functools.lru_cache(maxsize=MAX_COMPILED)
def _compiled(kind: Hashable, function: Callable[..., Any]) -> Callable[..., Any]:
    # torch tells functions apart by their code object, which a closure or a partial would share.
    name = f"flex_attention_{abs(hash(kind)):x}"
    own = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, dynamic=False)
    return compiled


def _adding(bias: torch.Tensor) -> Callable[..., torch.Tensor]:
    steps = index_steps(bias)

    def add(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return score + bias[b * steps[0], h * steps[1], q * steps[2], k]

    return add


def _kernel_options(head_size: int, value_head_size: int) -> dict[str, Any]:
    """One kernel for short and long queries alike; small tiles where torch has chosen none for the padded head size."""
    options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
    largest = max(head_size, value_head_size)
    if 128 < largest < 256:  # padded to 256, which torch's general choice of tiles does not reckon with
        options |= {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "fwd_num_stages": 2}
    return options
