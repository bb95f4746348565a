"""What predictions need to know of a machine: how fast its attention, its memory and its wires are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wires:
    """One way between the GPUs of a host. Bandwidths in bytes per second, times in seconds.

    Attributes:
        exchange, shift: what one rank sends while it receives as much: to all, and to one.
        latency: of an exchange without bytes.
        hindrance: by how much of the time of an exchange a kernel that runs beside it takes longer.
        staged: whether bytes are laid ready where others read them, a copy more for what lay ready elsewhere.
    """

    exchange: float
    shift: float
    latency: float
    hindrance: float
    staged: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs of one kind, several to a host. Bandwidths in bytes per second, times in seconds.

    Attributes:
        name: of the machine, for tables.
        attention_flops: FLOP per second of an attention kernel that fills all processors for long.
        processors, tile_rows: query rows of one head are computed in tiles, one on each processor at a time.
        tile_start: keys that beginning and ending a tile takes as long as.
        copy: bytes of device memory read and written.
        launch: from the end of one kernel to the start of the next.
        ranks_per_host: GPUs that see one another without a network.
        collectives, memory: NCCL inside of a host, and the memory of one another's GPUs.
        network: what one rank sends to other hosts while it receives as much.
        network_latency: of an exchange across hosts without bytes.
    """

    name: str
    attention_flops: float
    processors: int
    tile_rows: int
    tile_start: int
    copy: float
    launch: float
    ranks_per_host: int
    collectives: Wires
    memory: Wires
    network: float
    network_latency: float

    def wires(self, ranks: int, symmetric_memory: bool | None) -> Wires:
        """Of a group of so many ranks, numbered one after the other; hosts share no memory."""
        shares = symmetric_memory is not False and ranks <= self.ranks_per_host
        return self.memory if shares else self.collectives

    def all_to_all_seconds(self, matrix: Sequence[Sequence[int]], wires: Wires) -> float:
        """An exchange in which rank r sends matrix[r][p] bytes to rank p: as long as its busiest wire, in or out."""
        near, leaves = self.ranks_per_host, len(matrix) > self.ranks_per_host
        columns, slowest = list(zip(*matrix, strict=True)), 0.0
        for rank in range(len(matrix)):
            first = rank // near * near
            for line in (matrix[rank], columns[rank]):
                inside = sum(line[first : first + near]) - line[rank]
                outside = sum(line) - line[rank] - inside
                slowest = max(slowest, inside / wires.exchange, outside / self.network)
        return slowest + (self.network_latency if leaves else wires.latency)

    def shift_seconds(self, passed: int, ranks: int, wires: Wires) -> float:
        """A round of a ring whose ranks pass on so many bytes each; one that leaves a host waits for its network."""
        if ranks > self.ranks_per_host:
            return self.network_latency + passed / self.network
        return wires.latency + passed / wires.shift


H200 = Machine(
    name="NVIDIA H200, eight to a host, 400 Gbit/s of network for each",
    # Measured, FlashAttention 3 in bfloat16: 75600 tokens of 40 heads of 128 in 176.2 ms.
    attention_flops=666e12,
    # Four shapes from 4608 to 32760 tokens and one with 512 keys then differ by 3 % at most: 755 to 780 TFLOP/s, which
    # calls of some milliseconds reach, and long ones, short of power, do not.
    processors=132,
    tile_rows=128,
    tile_start=128,
    copy=4.3e12,  # measured
    launch=4e-6,  # assumed
    ranks_per_host=8,
    collectives=Wires(
        exchange=254e9,  # measured between two: half of 387 MB sent in 0.76 ms
        shift=306e9,  # measured between two: 387 MB in 1.27 ms
        latency=25e-6,  # assumed
        # Measured between two: a ring's kernel of FlashAttention 3 takes longer by all of the exchange beside it. Not
        # in here: kernels of NCCL and of attention that wait for one another's processors, and take a third longer.
        hindrance=1.0,
    ),
    memory=Wires(
        exchange=360e9,  # measured between two: four times half of 387 MB read in 2.15 ms
        shift=360e9,
        latency=40e-6,  # measured: two waits for all ranks of 18 microseconds each, and the start of a copy
        hindrance=0.2,  # measured between two: 34 ms of reading made a kernel of 85 ms take 6 to 7 ms longer
        staged=True,
    ),
    network=45e9,  # assumed: 0.9 of 50 GB/s
    network_latency=60e-6,  # assumed
)
"""Of one or two GPUs, as measured (benchmarks/notes), and of more as assumed where the comments say so."""
