"""Symmetric memory of torch.distributed: GPUs of one host read one another's, and copy engines do the reading."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omni_attn.errors import ConfigError, MetadataError
from omni_attn.parallel.collectives import Connected

try:
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory as symmetric
except ImportError:  # a torch without it says so in `why_not`
    symmetric = None  # type: ignore[assignment]

_TRIED = 4096
"""Bytes that a group first shares to see whether it can."""


class SymmetricMemory(Connected):
    """See omni_attn.parallel.peers.PeerMemory.

    Memory is kept and used again: about as many bytes as all exchanges that are under way at once take. Who replays a
    CUDA graph does so on the stream that other exchanges of the group are on, or waits in between.

    Args:
        group: ranks whose GPUs see one another, see `why_not`.
        device: this rank's GPU.
        timeout_seconds: how long a rank waits in an exchange for the others before its GPU gives up.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: int) -> None:
        self.group, self.device, self.timeout_ms = group, device, 1000 * timeout_seconds
        # Copies go before kernels of other streams that have not begun.
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.free: list[SymmetricRegion] = []

    @property
    def user(self) -> torch.cuda.Stream:
        """The current stream."""
        return torch.cuda.current_stream(self.device)

    def take(self, size: int) -> SymmetricRegion:
        """See omni_attn.parallel.peers.PeerMemory.

        Raises:
            MetadataError: there is none, and a CUDA graph is being captured, in which none can be made.
            ConfigError: a rank has no memory left; on all ranks.
        """
        fitting = [region for region in self.free if region.size >= size]
        is_captured = torch.cuda.is_current_stream_capturing()
        if fitting:
            region = min(fitting, key=lambda found: found.size)
            self.free.remove(region)
            region.follow()
            region.is_captured |= is_captured
            return region
        if is_captured:
            raise MetadataError(
                f"An exchange needs {size} bytes that the ranks share, and cannot get them while a graph is captured: "
                "run the same step once before its CUDA graph is captured, or set parallel.symmetric_memory: false"
            )
        # All are too small; a graph writes into those that it was captured with.
        self.free = [region for region in self.free if region.is_captured]
        return SymmetricRegion(self, _rounded(size))


def _rounded(size: int) -> int:
    """A quarter more at most, so that calls which grow little by little do not get memory anew each time."""
    step = max(1 << 20, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


class SymmetricRegion:
    """See omni_attn.parallel.peers.Region. All ranks construct it together.

    Args:
        memory: that it goes back to.
        size: bytes.

    Raises:
        ConfigError: see SymmetricMemory.take.
    """

    def __init__(self, memory: SymmetricMemory, size: int) -> None:
        self.memory, self.size, self.is_captured = memory, size, False
        found = _allocated(size, memory.device)
        # Who got none says so before others wait for it.
        if told := first_word(memory.group, found if isinstance(found, str) else ""):
            raise ConfigError(f"parallel.symmetric_memory: {told}. Free some, or set it to false")
        assert isinstance(found, Tensor)
        self._tensor, self._handle = found, symmetric.rendezvous(found, memory.group)
        self._read: torch.cuda.Event | None = None
        self._user: torch.cuda.Stream | None = None

    def view(self, owner: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """See omni_attn.parallel.peers.Region."""
        return self._handle.get_buffer(owner, (count,), dtype, start // dtype.itemsize)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See omni_attn.parallel.peers.Region."""
        self._wait_for_all()
        stream = self.memory.stream
        stream.wait_stream(self.memory.user)
        with torch.cuda.stream(stream):
            yield
        self._read = stream.record_event()

    def give_back(self) -> None:
        """See omni_attn.parallel.peers.Region."""
        assert self._read is not None
        self._user = self.memory.user
        self._user.wait_event(self._read)
        self._wait_for_all()
        self.memory.free.append(self)

    def follow(self) -> None:
        """The current stream writes behind the one that waited for the last readers, if that was another."""
        user, current = self._user, self.memory.user
        # A graph waits for nothing outside of it: who captures has waited for all streams.
        if user is not None and user != current and _is_capturing(user) == _is_capturing(current):
            current.wait_stream(user)

    def _wait_for_all(self) -> None:
        """The current stream does, and no other: who waits takes a processor from a kernel that starts meanwhile.

        A kernel that gives its work out in advance, one share for each processor, then takes up to twice as long.
        """
        self._handle.barrier(0, self.memory.timeout_ms)


def why_not(group: dist.ProcessGroup, device: torch.device) -> str:
    """What keeps ranks from reading the memory of others of their groups; empty where nothing does. All ask together.

    Args:
        group: one of those that each rank is in one of; the answer is the same for all of them.
        device: this rank's.
    """
    if device.type != "cuda":
        return f"their tensors live on the {device.type}"
    # Nobody tries to share before all are ready to: groups that differ in how often they did could not do so any more.
    return first_word(None, _apart(group, device)) or first_word(None, _tried(group, device))


def first_word(group: dist.ProcessGroup | None, said: str) -> str:
    """What the first rank of a group says that says something; None = of all ranks."""
    return next(filter(None, _of_all(group, said)), "")


def _apart(group: dist.ProcessGroup, device: torch.device) -> str:
    """What keeps this rank's GPU from those of its group, as far as it sees them."""
    places = _of_all(group, (socket.gethostname(), device.index))
    hosts = {host for host, _ in places}
    if len(hosts) > 1:
        return f"their GPUs lie on {len(hosts)} hosts"
    if symmetric is None:
        return f"torch {torch.__version__} has no symmetric memory"
    others = sorted({index for _, index in places} - {device.index})
    seen = (index for index in others if index < torch.cuda.device_count())
    far = [index for index in seen if not torch.cuda.can_device_access_peer(device, index)]
    return f"GPU {device.index} does not reach the memory of GPU {far[0]}" if far else ""


def _tried(group: dist.ProcessGroup, device: torch.device) -> str:
    found = _allocated(_TRIED, device)
    if isinstance(found, str):
        return found
    try:
        symmetric.rendezvous(found, group)
    except RuntimeError as error:
        return f"rank {dist.get_rank()} cannot share memory: {_first_line(error)}"
    return ""


def _allocated(size: int, device: torch.device) -> Tensor | str:
    """Bytes that others can read, or why there are none. They go back to the device with their tensor, and to no pool.

    In a pool they would keep what they were shared by, under the names of groups that other groups may get.
    """
    try:
        with torch.inference_mode(False):  # they outlive the mode in force
            return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    except RuntimeError as error:
        return f"rank {dist.get_rank()} got no {size} bytes to share: {_first_line(error)}"


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _of_all(group: dist.ProcessGroup | None, said: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, said, group=group)
    return found
