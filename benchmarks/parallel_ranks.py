"""Processes that measure together: how they are started, timed and agreed; and ranks whose exchanges stand still."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.rounds import FLUSHES
from omni_attn.config import ParallelConfig
from omni_attn.parallel import Parallel
from omni_attn.parallel.collectives import Group, Pending
from omni_attn.parallel.connection import connect
from omni_attn.parallel.outbox import Outbox, Rows
from omni_attn.tuning.clocks import FLUSH_BYTES, Call, WallClock

# A rank that fails leaves the others waiting for no longer than this.
PATIENCE = timedelta(seconds=120)


def on_ranks(work: Callable[[list[str]], None], words: list[str], ranks: int, *, toy: bool) -> None:
    """Runs `work(words)` in so many processes of this host, one GPU each, or as torchrun started this one.

    Args:
        work: a function of a module, so that a new process finds it.
        words: handed to it.
        toy: on the CPU, with gloo.
    """
    if "WORLD_SIZE" in os.environ:
        found = int(os.environ["WORLD_SIZE"])
        if found != ranks:
            raise SystemExit(f"--ranks {ranks}, and torchrun started {found} processes: say the same to both")
        _join(work, words, toy)
        return
    found = torch.cuda.device_count()
    if not toy and found < ranks:
        raise SystemExit(
            f"--ranks {ranks} needs as many GPUs, found {found}: --alone predicts from one GPU, and --toy runs a small "
            "case on a CPU"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn(_spawned, (work, words, ranks, port, toy), nprocs=ranks)  # type: ignore[no-untyped-call]


def _spawned(
    rank: int, work: Callable[[list[str]], None], words: list[str], ranks: int, port: int, toy: bool
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    _join(work, words, toy)
    sys.stdout.flush()
    os._exit(0)  # threads of gloo that still live abort one in twenty processes which end in the orderly way


def _join(work: Callable[[list[str]], None], words: list[str], toy: bool) -> None:
    if toy:
        dist.init_process_group("gloo", timeout=PATIENCE)
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=PATIENCE, device_id=device)
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # one voice is enough
    try:
        work(words)
        dist.barrier()  # nobody leaves while another still waits for it
    finally:
        dist.destroy_process_group()


def joined(config: ParallelConfig, device: torch.device) -> Parallel:
    """This process's place in a configuration."""
    return connect(config.model_copy(update={"timeout_seconds": PATIENCE.seconds}), device.type)


class RankClock:
    """A device's clock; the ranks begin together.

    Times of a call that exchanges are those of this rank: the slowest one's are the call's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._wall = WallClock(device)
        self._flushed = torch.empty(FLUSH_BYTES if self._on_gpu else 1, dtype=torch.uint8, device=device)
        self._signal = torch.zeros(1, device=device)
        self._together = dist.is_initialized()

    def milliseconds(self, call: Call) -> float:
        """Device time of one call behind a flush and a signal of all ranks; wall time where there is no GPU."""
        if not self._on_gpu:
            return self._wall_milliseconds(call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(FLUSHES):
            self._flushed.zero_()
        if self._together:
            dist.all_reduce(self._signal)  # on the device: no kernel of the call starts before all are here
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def _wall_milliseconds(self, call: Call) -> float:
        if self._together:  # a fixed number of calls: ranks that made up their own would wait for one another
            dist.barrier()
            return 1e3 * min(self._wall._seconds(call) for _ in range(3))
        return self._wall.milliseconds(call)


def of_all_ranks(numbers: Sequence[float]) -> list[tuple[float, ...]]:
    """For each of these numbers, those of all ranks."""
    if not dist.is_initialized():
        return [(number,) for number in numbers]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(numbers))
    return list(zip(*found, strict=True))


class StillCollectives(Group):
    """The first of so many ranks on a device that is alone: what it would get is there at once, as it was sent.

    Shapes are right and numbers are not, so that everything around an exchange can be timed. Where it would get more
    than it sends, it gets the same rows each time, copied when a shape first comes.
    """

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self._arrived: dict[tuple[object, ...], torch.Tensor] = {}

    def start_all_to_all(self, outbox: Outbox) -> Pending:
        """As many rows as would be received."""
        assert isinstance(outbox, Rows)
        rows, wanted = outbox.rows, sum(outbox.counts.receive)
        return rows if wanted == rows.shape[0] else self._as_many(rows, wanted)

    def start_all_gather(self, rows: torch.Tensor) -> Pending:
        """The rows as often as there are ranks."""
        return self._as_many(rows, self.size * rows.shape[0])

    def wait(self, pending: Pending) -> torch.Tensor:
        """Nothing to wait for."""
        arrived: torch.Tensor = pending
        return arrived

    def share_counts(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """This rank's, for each."""
        return (tuple(counts),) * self.size

    def _as_many(self, rows: torch.Tensor, wanted: int) -> torch.Tensor:
        key = (rows.shape, rows.dtype, wanted)
        if key not in self._arrived:
            times = -(-wanted // max(rows.shape[0], 1))
            self._arrived[key] = rows.repeat(times, *[1] * (rows.dim() - 1))[:wanted]
        return self._arrived[key]


def still(config: ParallelConfig) -> Parallel:
    """The first rank of a configuration whose exchanges stand still."""
    groups = (StillCollectives(n) for n in (config.size, config.ulysses_degree, config.ring_degree))
    return Parallel(config, *groups)
