"""Lengths as FlashInfer's TRT-LLM kernels take them, made once and kept; and the kernels' workspace.

A call needs five small tensors. They depend on lengths and device alone, so calls of one shape share them. None is made
while a CUDA graph is captured: a run before the capture makes them, and a captured graph holds their addresses, which
is why they are kept for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch

from omni_attn.backends.stated import check_token_count
from omni_attn.errors import MetadataError
from omni_attn.ops.layout import int32_on


@dataclass(frozen=True, eq=False)
class Lengths:
    """Sequences that lie behind one another, query and key tokens each.

    Attributes:
        batch_size: how many.
        max_q, max_k: the longest query and key sequence.
        cu_q, cu_k: boundaries, int32 [batch_size + 1] on the device.
        seq_lens: key tokens of each, int32 [batch_size] on the device.
        mirrors: query and key tokens of each on the host, as FlashInfer's keyword arguments; empty where only the
            device knows them.
    """

    batch_size: int
    max_q: int
    max_k: int
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    seq_lens: torch.Tensor
    mirrors: Mapping[str, torch.Tensor]


@cache
def even_lengths(batch_size: int, queries: int, keys: int, device: torch.device) -> Lengths:
    """A batch of equally long sequences, as a [B, S, H, D] tensor holds them.

    Raises:
        MetadataError: more tokens than int32 counts; or called while a CUDA graph is captured.
    """
    check_token_count("TRTLLM_ATTN", batch_size * max(queries, keys))
    _refuse_capture(device)
    steps = torch.arange(batch_size + 1, device=device, dtype=torch.int32)
    return Lengths(
        batch_size,
        queries,
        keys,
        cu_q=steps * queries,
        cu_k=steps * keys,
        seq_lens=torch.full((batch_size,), keys, dtype=torch.int32, device=device),
        mirrors=_mirrors([queries] * batch_size, [keys] * batch_size),
    )


@cache
def packed_lengths(q_lens: tuple[int, ...], k_lens: tuple[int, ...], device: torch.device) -> Lengths:
    """Sequences of the given query and key tokens.

    Raises:
        MetadataError: more tokens than int32 counts; or called while a CUDA graph is captured.
    """
    check_token_count("TRTLLM_ATTN", max(sum(q_lens), sum(k_lens)))
    _refuse_capture(device)
    cu_q, cu_k = (int32_on(device, [0, *accumulate(lens)]) for lens in (q_lens, k_lens))
    seq_lens = int32_on(device, k_lens)
    return Lengths(len(q_lens), max(q_lens), max(k_lens), cu_q, cu_k, seq_lens, _mirrors(q_lens, k_lens))


def device_lengths(cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int) -> Lengths:
    """Sequences between boundaries that only the device knows."""
    return Lengths(len(cu_q) - 1, max_q, max_k, cu_q, cu_k, cu_k[1:] - cu_k[:-1], {})


@cache
def workspace(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Scratch memory of a device, zero at first; calls on one device use it one after the other, as streams do.

    Raises:
        MetadataError: called while a CUDA graph is captured.
    """
    _refuse_capture(device)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _mirrors(
    q_lens: list[int] | tuple[int, ...], k_lens: list[int] | tuple[int, ...]
) -> dict[str, torch.Tensor]:
    return {
        "q_seq_lens_cpu": torch.tensor(q_lens, dtype=torch.int32, device="cpu"),
        "kv_seq_lens_cpu": torch.tensor(k_lens, dtype=torch.int32, device="cpu"),
    }


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise MetadataError(
            "TRTLLM_ATTN makes its workspace and lengths in the first call of a shape, and a CUDA graph is being "
            "captured: run the same call once before the capture"
        )
