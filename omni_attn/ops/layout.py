"""Memory layouts that kernels ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch

INT32_MAX = 2**31 - 1


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its last dimension lies dense in memory, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def int32_on(device: torch.device, values: Sequence[int]) -> torch.Tensor:
    """Host numbers as an int32 tensor [N] on a device; copied from pinned memory, so that the host does not wait."""
    if device.type != "cuda" or torch.compiler.is_compiling():  # compiled code makes a constant of it
        return torch.tensor(values, dtype=torch.int32, device=device)
    return without_waiting(torch.tensor(values, dtype=torch.int32, device="cpu"), device)


def without_waiting(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; the host does not wait for a copy of its own to a GPU, which starts in pinned memory."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one, for launchers that look at nothing else; free where it already is."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """Bytes that one kernel may use; without a GPU, where kernels are interpreted, as many as Hopper's."""
    if device.type != "cuda":
        return 227 * 1024
    facts = torch.cuda.get_device_properties(device)
    return getattr(facts, "shared_memory_per_block_optin", 0) or facts.shared_memory_per_block


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """How many programs a GPU runs side by side on hardware of their own; without a GPU one."""
    return 1 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def fits_int32(*tensors: torch.Tensor, limit: int = INT32_MAX) -> bool:
    """Whether each offset inside the tensors, and inside a contiguous copy of them, fits 32 bits."""
    for tensor in tensors:
        # A small storage settles it, and is all that the usual call pays for.
        if tensor.numel() > limit or (
            tensor.untyped_storage().nbytes() > limit and _last_offset(tensor) > limit
        ):
            return False
    return True


def item_by_item(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Runs `attend` on contiguous copies of one batch item after the other: [B, S, H, D] as `attend` gives it."""
    items = (
        attend(*(x[item : item + 1].contiguous() for x in (query, key, value)))
        for item in range(query.shape[0])
    )
    return torch.cat(tuple(items))


def _last_offset(tensor: torch.Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return sum((size - 1) * stride for size, stride in sizes)
