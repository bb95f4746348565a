"""Time of one call on its device, in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], torch.Tensor]

# Written before each call that is timed on a GPU: larger than any L2 cache, so that none holds the tensors of the
# call before; and long enough for the host to be ahead of the device, so that launching is not part of the time.
FLUSH_BYTES = 256 * 2**20
FLUSHES = 4
# Calls behind one reading of the wall clock: at least this long together, and this many unless they are long.
SAMPLE_SECONDS = 2e-3
SAMPLE_CALLS = 3
LONG_SECONDS = 0.1


class Clock(Protocol):
    """Something that times a call."""

    def milliseconds(self, call: Call) -> float:
        """Time of one call."""
        ...


class EventClock:
    """CUDA events around one call, behind a flush of the caches.

    Args:
        flushes: how often; more of them give the host more time to queue a call of many launches.
    """

    def __init__(self, device: torch.device, flushes: int = FLUSHES) -> None:
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._flushes = flushes

    def milliseconds(self, call: Call) -> float:
        """Device time of one call, launch latency not included."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(self._flushes):
            self._flushed.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


class WallClock:
    """The host's clock, for devices without events of their own.

    What else runs on the machine makes a call later and never earlier: the fastest of a few calls counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def milliseconds(self, call: Call) -> float:
        """Time of the fastest of some calls; of one call where it is long."""
        times = [self._seconds(call)]
        while sum(times) < SAMPLE_SECONDS or (len(times) < SAMPLE_CALLS and max(times) < LONG_SECONDS):
            times.append(self._seconds(call))
        return 1e3 * min(times)

    def _seconds(self, call: Call) -> float:
        self._wait()
        start = time.perf_counter()
        call()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "mps":
            torch.mps.synchronize()


def clock_for(device: torch.device, flushes: int = FLUSHES) -> Clock:
    """The clock of a device; see EventClock for `flushes`."""
    return EventClock(device, flushes) if device.type == "cuda" else WallClock(device)


def method_of(device: torch.device) -> str:
    """How a device's clock times, in words."""
    if device.type == "cuda":
        return "CUDA events around one call, caches flushed before it"
    return "wall clock, the fastest of a few calls, caches warm"


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Most memory that a call holds beyond its inputs, its output included; None where nobody counts it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
