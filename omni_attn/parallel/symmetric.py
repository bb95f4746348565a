"""Symmetric memory of torch.distributed: GPUs of one host read one another's, and copy engines do the reading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from omni_attn.errors import ConfigError, MetadataError
from omni_attn.parallel.collectives import Connected
from omni_attn.parallel.sharing import allocate, first_word, share


class SymmetricMemory(Connected):
    """See omni_attn.parallel.peers.PeerMemory.

    Memory is kept and used again: for each exchange that is under way at once, as much as its largest parcel takes for
    each other rank, and up to a quarter more. What a CUDA graph was captured with stays for good; who replays it does
    so on the stream that other exchanges of the group are on, or waits in between.

    Args:
        group: ranks whose GPUs see one another, see omni_attn.parallel.sharing.why_not.
        device: this rank's GPU.
        timeout_seconds: how long a rank waits in an exchange for the others before its GPU gives up.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_seconds: int) -> None:
        self.group, self.device, self.timeout_ms = group, device, 1000 * timeout_seconds
        # Untested whether copies gain from it.
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
            ConfigError: a rank has no memory left; on all ranks of the group.
        """
        fitting = [region for region in self.free if region.size >= size]
        is_captured = _is_capturing(self.user)
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
        # All are too small, and one makes room for the new one: as many stay as were ever under way at once.
        replaced = [region for region in self.free if not region.is_captured]
        if replaced:
            self.free.remove(max(replaced, key=lambda found: found.size))
        # Memory that goes back waits for the device. Here a thread that ends this process can still run.
        torch.cuda.synchronize(self.device)
        del replaced
        return SymmetricRegion(self, _rounded(size))


def _rounded(size: int) -> int:
    """A quarter more, or a MiB, so that calls which grow little by little do not get memory anew each time."""
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
        found = allocate(size, memory.device)
        torch.cuda.synchronize(memory.device)  # before others signal into what may still be cleared
        # Who got none says so before others wait for it.
        if told := first_word(memory.group, found if isinstance(found, str) else ""):
            raise ConfigError(f"parallel.symmetric_memory: {told}. Free some, or set it to false")
        assert isinstance(found, Tensor)
        self._tensor, self._handle = found, share(found, memory.group)
        self._read: torch.cuda.Event | None = None
        self._user: torch.cuda.Stream | None = None

    def view(self, owner: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """See omni_attn.parallel.peers.Region."""
        found: Tensor = self._handle.get_buffer(owner, (count,), dtype, start // dtype.itemsize)
        return found

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


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
