"""What a MiniMax-H3 block does row by row, in one Triton pass each, against torch's operators in the same run.

    python -m benchmarks.h3_rows [--rows 37740] [--rounds N] [--output FILE] [--toy]

The real sizes: hidden size 5376, 56 heads of 128 of which 96 channels turn, feed-forward 14336, tables for three times;
bfloat16, eager, without gradients. "GB/s" counts what has to be read and written once. "Error" is relative to float64
(Frobenius), of the kernels and of torch's operators. Rounds are shuffled; medians of timings count, with caches
flushed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.arguments import device_of
from benchmarks.machine import machine_line
from benchmarks.rounds import shuffled_rounds
from benchmarks.tables import Report, markdown_table
from omni_attn.models.minimax_h3 import block, rope
from omni_attn.ops import rowwise
from omni_attn.tuning.clocks import clock_for

COLUMNS = ("pass", "kernel, ms", "GB/s", "torch, ms", "torch / kernel", "error", "torch's error")
EPS = 1e-5


class Work(NamedTuple):
    """One function of the block, its inputs, and the input-sized tensors that it has to read and write."""

    call: Callable[..., Tensor]
    inputs: tuple[object, ...]
    moved: int


class Size(NamedTuple):
    """Rows, and what a row consists of."""

    rows: int = 37740
    hidden: int = 5376
    heads: int = 56
    head_size: int = 128
    frequencies: int = 16
    ffn: int = 14336


def passes(size: Size, device: torch.device) -> Mapping[str, Work]:
    """Each pass with seeded inputs."""
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    def norm(channels: int) -> nn.RMSNorm:
        made = nn.RMSNorm(channels, eps=EPS, device=device)
        made.weight.data = noise(channels)
        return made

    x, y, tables = (
        noise(1, size.rows, size.hidden),
        noise(1, size.rows, size.hidden),
        noise(9, 6, size.hidden),
    )
    shift, scale, gate = tables.unbind(1)[:3]
    rows = torch.randint(9, (size.rows,), device=device, generator=generator).sort().values
    heads = noise(1, size.rows, size.heads, size.head_size)
    positions = torch.rand(size.rows, 3, device=device, generator=generator) * 300
    table = rope.build_rope_table(positions, size.frequencies, 10000.0, torch.bfloat16)
    both = noise(1, size.rows, 2 * size.ffn)
    return {
        "norm and modulation": Work(
            block.modulate, (norm(size.hidden), x, shift, scale, rows), 2 * x.numel()
        ),
        "gated sum": Work(block.add_gated, (x, y, gate, rows), 3 * x.numel()),
        "norm and rotation": Work(
            rope.norm_and_turn, (norm(size.head_size), heads, table), 2 * heads.numel()
        ),
        "SwiGLU": Work(block.swiglu, (both,), both.numel() * 3 // 2),
    }


def run(work: Work, kernels: bool) -> Tensor:
    """The pass with the kernels, or with torch's operators."""
    chosen = rowwise.rowwise_kernels if kernels else lambda *_: None
    with (
        torch.no_grad(),
        patch.object(block, "rowwise_kernels", chosen),
        patch.object(rope, "rowwise_kernels", chosen),
    ):
        return work.call(*work.inputs)


def errors(work: Work) -> list[float]:
    """Relative errors of both against float64."""

    def wide(value: object) -> object:
        if isinstance(value, nn.RMSNorm):
            made = nn.RMSNorm(value.normalized_shape, eps=value.eps, device=value.weight.device).double()
            made.weight.data = value.weight.double()
            return made
        if isinstance(value, rope.RopeTable):
            return rope.RopeTable(*(part.double() for part in value))
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    exact = run(work._replace(inputs=tuple(map(wide, work.inputs))), False)
    return [float((run(work, kernels) - exact).norm() / exact.norm()) for kernels in (True, False)]


def main(words: list[str] | None = None) -> None:
    """Measures each pass and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=Size().rows)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument(
        "--toy", action="store_true", help="a size that a CPU runs, on torch's operators alone"
    )
    asked = parser.parse_args(words)
    device = torch.device("cpu") if asked.toy else device_of(toy=False)
    size = Size(20, 48, 2, 32, 4, 80) if asked.toy else Size(rows=asked.rows)
    report, clock = Report(asked.output), clock_for(device)
    report.say(machine_line(device.type))
    table = []
    for name, work in passes(size, device).items():
        found = errors(work)
        times: dict[bool, list[float]] = {True: [], False: []}
        for _, kernels in shuffled_rounds((True, False), asked.rounds, seed=0):
            times[kernels].append(clock.milliseconds(partial(run, work, kernels)))
        ours, torchs = (statistics.median(times[kernels]) for kernels in (True, False))
        speed = f"{2 * work.moved / ours / 1e6:.0f}"
        table.append(
            [
                name,
                f"{ours:.3f}",
                speed,
                f"{torchs:.3f}",
                f"{torchs / ours:.2f}",
                *(f"{e:.1e}" for e in found),
            ]
        )
    report.say(markdown_table(COLUMNS, table))


if __name__ == "__main__":
    main()
