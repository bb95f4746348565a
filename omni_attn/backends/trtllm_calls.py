"""Calls of TRTLLM_ATTN's kernels on [B, S, H, D] tensors: directly, and as opaque operators for torch.compile."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omni_attn.backends.trtllm_kernels import Quantisation, TrtllmKernel, import_trtllm_kernel
from omni_attn.backends.trtllm_lengths import Lengths, device_lengths, even_lengths, packed_lengths
from omni_attn.errors import MetadataError

# Kernels by variant, for the operators below: an operator's arguments are tensors, numbers and text.
_kernels: dict[str, TrtllmKernel] = {}


def load_kernel(variant: str, quantised: bool) -> TrtllmKernel:
    """The kernel of a variant, imported.

    Raises:
        BackendImportError: see import_trtllm_kernel.
    """
    _kernels[variant] = import_trtllm_kernel(variant, quantised)
    return _kernels[variant]


def attend(
    kernel: TrtllmKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_lens: tuple[int, ...],
    k_lens: tuple[int, ...],
    softmax_scale: float,
    causal: bool,
    factor: float | None,
    quant: Quantisation | None,
) -> torch.Tensor:
    """Output [B, Sq, H, D], contiguous.

    Args:
        query: [B, Sq, H, D]; key, value: [B, Sk, G, D].
        q_lens, k_lens: tokens of the sequences that lie behind one another in a batch of 1; empty = each item of the
            batch is one sequence.
        factor: skip-softmax factor, None = none.
    """
    batch_size, queries, heads, size = query.shape
    device = query.device
    if q_lens:
        lengths = packed_lengths(q_lens, k_lens, device)
    elif batch_size:
        lengths = even_lengths(batch_size, queries, key.shape[1], device)
    else:
        return query.new_empty(query.shape)
    tensors = _flat(query), _flat(key), _flat(value)
    if quant is not None and kernel.quantiser is not None and kernel.quantiser.straddles(lengths, *quant[1:]):
        output = _one_by_one(kernel, tensors, lengths, softmax_scale, causal, factor, quant)
    else:
        output = kernel.attend(*tensors, lengths, softmax_scale, causal, factor, quant)
    return output.view(batch_size, queries, heads, size)


def attend_packed(
    kernel: TrtllmKernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float,
    causal: bool,
    factor: float | None,
) -> torch.Tensor:
    """The same for [1, T, H, D] between boundaries that only the device knows; rows of no sequence hold anything."""
    if query.shape[0] != 1:
        raise MetadataError(f"packed sequences come as [1, T, H, D], query has a batch of {query.shape[0]}")
    lengths = device_lengths(cu_q, cu_k, max_q, max_k)
    tensors = _flat(query), _flat(key), _flat(value)
    return kernel.attend(*tensors, lengths, softmax_scale, causal, factor, None).view(query.shape)


def _flat(tensor_BSHD: torch.Tensor) -> torch.Tensor:
    return tensor_BSHD.contiguous().flatten(0, 1)


def _one_by_one(
    kernel: TrtllmKernel,
    tensors_THD: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: Lengths,
    softmax_scale: float,
    causal: bool,
    factor: float | None,
    quant: Quantisation,
) -> torch.Tensor:
    """Sequence by sequence, for a quantiser whose blocks would hold tokens of two."""
    q_lens, k_lens = (lens.tolist() for lens in lengths.mirrors.values())
    query, key, value = tensors_THD
    parts = [
        kernel.attend(
            q, k, v, even_lengths(1, len(q), len(k), q.device), softmax_scale, causal, factor, quant
        )
        for q, k, v in zip(
            torch.split(query, q_lens), torch.split(key, k_lens), torch.split(value, k_lens), strict=True
        )
    ]
    return torch.cat(parts)


@torch.library.custom_op("omni_attn::trtllm", mutates_args=())
def trtllm_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    softmax_scale: float,
    causal: bool,
    factor: float | None,
    quant_dtype: str | None,
    q_block: int,
    k_block: int,
    variant: str,
) -> torch.Tensor:
    """attend, with the kernel by the name of its variant."""
    quant = None if quant_dtype is None else Quantisation(quant_dtype, q_block, k_block)
    lens = tuple(q_lens), tuple(k_lens)
    return attend(_kernels[variant], query, key, value, *lens, softmax_scale, causal, factor, quant)


@torch.library.custom_op("omni_attn::trtllm_packed", mutates_args=())
def trtllm_packed_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    softmax_scale: float,
    causal: bool,
    factor: float | None,
    variant: str,
) -> torch.Tensor:
    """attend_packed, with the kernel by the name of its variant."""
    boundaries = cu_q, cu_k, max_q, max_k
    return attend_packed(_kernels[variant], query, key, value, *boundaries, softmax_scale, causal, factor)


@trtllm_op.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)


@trtllm_packed_op.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape)
