"""What predictions need to know of a machine: how fast its attention, its memory and its wires are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
        exchange, shift: what one rank sends inside of its host while it receives as much: to all, and to one.
        network: what one rank sends to other hosts while it receives as much.
        hindrance: by how much of the time of an exchange a kernel that runs beside it takes longer.
        latency, network_latency: of an exchange without bytes, inside of a host and across hosts.
    """

    name: str
    attention_flops: float
    processors: int
    tile_rows: int
    tile_start: int
    copy: float
    launch: float
    ranks_per_host: int
    exchange: float
    shift: float
    network: float
    hindrance: float
    latency: float
    network_latency: float

    def all_to_all_seconds(self, matrix: Sequence[Sequence[int]]) -> float:
        """An exchange in which rank r sends matrix[r][p] bytes to rank p: as long as its busiest wire, in or out."""
        near, leaves = self.ranks_per_host, len(matrix) > self.ranks_per_host
        columns, slowest = list(zip(*matrix, strict=True)), 0.0
        for rank in range(len(matrix)):
            first = rank // near * near
            for line in (matrix[rank], columns[rank]):
                inside = sum(line[first : first + near]) - line[rank]
                outside = sum(line) - line[rank] - inside
                slowest = max(slowest, inside / self.exchange, outside / self.network)
        return slowest + (self.network_latency if leaves else self.latency)

    def shift_seconds(self, passed: int, ranks: int) -> float:
        """A round of a ring whose ranks pass on so many bytes each; one that leaves a host waits for its network."""
        if ranks > self.ranks_per_host:
            return self.network_latency + passed / self.network
        return self.latency + passed / self.shift


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
    exchange=254e9,  # measured between two: half of 387 MB sent in 0.76 ms
    shift=306e9,  # measured between two: 387 MB in 1.27 ms
    network=45e9,  # assumed: 0.9 of 50 GB/s
    # Measured between two: a ring's kernel of FlashAttention 3, which gives its processors their tiles in advance, took
    # longer by all of the exchange beside it.
    hindrance=1.0,
    latency=25e-6,  # assumed
    network_latency=60e-6,  # assumed
)
"""Of one or two GPUs, as measured (benchmarks/notes), and of more as assumed where the comments say so."""
