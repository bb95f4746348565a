"""Whether GPUs can share memory, and how they come to share it: torch's part of omni_attn.parallel.symmetric."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory as symmetric
except ImportError:  # a torch without it says so in `why_not`
    symmetric = None  # type: ignore[assignment]

_TRIED = 4096
"""Bytes that a group first shares to see whether it can."""
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"

_failed = ""
"""Why sharing failed midway in this process, on some rank."""


def why_not(group: dist.ProcessGroup, device: torch.device) -> str:
    """What keeps ranks from reading the memory of others of their groups; empty where nothing does. All ask together.

    Args:
        group: one of those that each rank is in one of; the answer is the same for all of them.
        device: this rank's.
    """
    global _failed
    if device.type != "cuda":
        return f"their tensors live on the {device.type}"
    # torch numbers what each process shares over all its groups, so all ranks share equally often: either all try, when
    # nothing speaks against it on any, or none; and none tries again where one failed midway.
    reason = _failed or first_word(None, _apart(group, device))
    if not reason:
        reason = _failed = first_word(None, _tried(group, device))
    return reason


def allocate(size: int, device: torch.device) -> Tensor | str:
    """Bytes that others can read, or why there are none. They go back to the device with their tensor, and to no pool.

    A pool's block remembers by the names of groups whom it was shared with, and names are used again.
    """
    problem = ""
    for _ in range(2):
        try:
            with torch.inference_mode(False):  # they outlive the mode in force
                return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        except RuntimeError as error:
            problem = f"rank {dist.get_rank()} got no {size} bytes to share: {_first_line(error)}"
            torch.cuda.empty_cache()  # what torch keeps for tensors it does not give of itself
    return problem


def share(tensor: Tensor, group: dist.ProcessGroup) -> Any:
    """The memory of all ranks, without what lets one write into all at once, which nothing here does."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        return symmetric.rendezvous(tensor, group)
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


def first_word(group: dist.ProcessGroup | None, said: str) -> str:
    """What the first rank of a group says that says something; None = of all ranks."""
    return next(filter(None, _of_all(group, said)), "")


def _apart(group: dist.ProcessGroup, device: torch.device) -> str:
    """What keeps this rank's GPU from those of its group, as far as it sees them."""
    places = _of_all(group, (_host(), device.index))
    hosts = {host for host, _ in places}
    if len(hosts) > 1:
        return f"their GPUs lie on {len(hosts)} hosts"
    if symmetric is None:
        return f"torch {torch.__version__} has no symmetric memory"
    backend = symmetric.get_backend(device)
    if backend not in (None, "CUDA"):
        return f"torch's symmetric memory is set to {backend}, and CUDA is needed"
    others = sorted({index for _, index in places} - {device.index})
    seen = (index for index in others if index < torch.cuda.device_count())
    far = [index for index in seen if not torch.cuda.can_device_access_peer(device, index)]
    return f"GPU {device.index} does not reach the memory of GPU {far[0]}" if far else ""


def _tried(group: dist.ProcessGroup, device: torch.device) -> str:
    found = allocate(_TRIED, device)
    if told := first_word(None, found if isinstance(found, str) else ""):
        return told
    assert isinstance(found, Tensor)
    try:
        share(found, group)
    except RuntimeError as error:
        return f"rank {dist.get_rank()} cannot share memory: {_first_line(error)}"
    return ""


def _host() -> tuple[str, ...]:
    """What tells machines and containers apart whose processes cannot hand one another memory."""
    boot, processes = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"
    known = [Path(boot).read_text() if Path(boot).exists() else ""]
    return (socket.gethostname(), *known, os.readlink(processes) if os.path.lexists(processes) else "")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _of_all(group: dist.ProcessGroup | None, said: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, said, group=group)
    return found
