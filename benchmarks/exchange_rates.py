"""How fast the GPUs of a host exchange, and what an exchange takes from an attention kernel that runs beside it.

    python -m benchmarks.exchange_rates [--ranks 2] [--beside 4,16] [--channels 16,24,32] [--rounds N] [--output FILE]

Starts a process for each GPU (torchrun does it as well). One exchange trades one tensor of Wan 14B at 720p (75600
tokens, 40 heads of 128, bfloat16), of which each rank holds its share of the tokens: each gives every rank an equal
part. It goes through NCCL, also with other numbers of channels, and through one another's memory, from parcels that
lie ready. The kernel is the platform's default, on a rank's share of the heads and all tokens. Rounds alternate; a
call begins on all GPUs at once, behind a flush of their caches, and takes as long as its slowest rank. Medians of CUDA
events.

The numbers are those that omni_attn/parallel/machines.py wants. --toy runs a small case on CPUs and gloo.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.arguments import device_of, split_lists
from benchmarks.machine import measured_line
from benchmarks.parallel_calls import FULL, TOY, Work, attention, inputs
from benchmarks.parallel_ranks import RankClock, joined, of_all_ranks, on_ranks
from benchmarks.rounds import shuffled_rounds
from benchmarks.tables import Report, markdown_table
from omni_attn.config import ParallelConfig
from omni_attn.parallel.collectives import Collectives
from omni_attn.parallel.outbox import Counts
from omni_attn.parallel.process_group import GroupCollectives
from omni_attn.tuning.clocks import Call

Named = tuple[str, Call, int]
"""What heads its row, the call, and the bytes that a rank sends to others in it."""


class Exchanges:
    """So many exchanges of one tensor by one group, started together.

    Args:
        tensor: [N] numbers of this rank, an equal part for each.
        count: exchanges.
    """

    def __init__(self, group: Collectives, tensor: torch.Tensor, count: int = 1) -> None:
        self._group, self._tensor, self._count = group, tensor, count
        each = tensor.numel() // group.size
        self._counts = Counts([each] * group.size, [each] * group.size, each)
        self.bytes = count * (group.size - 1) * each * tensor.element_size()

    def __call__(self, kernel: Callable[[], object] = lambda: None) -> torch.Tensor:
        """Starts them all, runs the kernel, and waits; what came last."""
        # What lies in the parcels says nothing; they are not written, so that the wires alone take time.
        outboxes = [self._group.outbox([self._tensor], self._counts) for _ in range(self._count)]
        pending = [self._group.start_all_to_all(outbox) for outbox in outboxes]
        kernel()
        return [self._group.wait(started) for started in pending][-1]


def candidates(work: Work, device: torch.device, arguments: argparse.Namespace) -> Iterator[Named]:
    """Exchanges alone, the kernel alone, and the kernel beside exchanges."""
    ranks = dist.get_world_size()
    tensor = inputs(work, device, 1)[0].flatten()
    tensor = tensor[: tensor.numel() // ranks**2 * ranks]  # this rank's tokens, an equal part for each rank
    ways = _ways(ranks, device, arguments)
    for name, group in ways.items():
        exchange = Exchanges(group, tensor)
        yield f"{name}, one exchange", exchange, exchange.bytes
    own = replace(work, heads=max(1, work.heads // ranks))
    kernel, _ = attention(own, inputs(own, device, 3), None, overridden=False, parallel=None)
    yield f"attention, {own.heads} heads", kernel, 0
    for name, group in ways.items():
        if "channels" not in name:
            for count in arguments.beside:
                exchanges = Exchanges(group, tensor, count)
                yield f"{name}, {count} exchanges", exchanges, exchanges.bytes
                yield f"attention beside {count} of {name}", partial(exchanges, kernel), 0


def _ways(ranks: int, device: torch.device, arguments: argparse.Namespace) -> dict[str, Collectives]:
    """The groups that exchange, by name."""
    if device.type != "cuda":
        return {"gloo": joined(ParallelConfig(ulysses_degree=ranks), device).ulysses}
    found: dict[str, Collectives] = {
        name: joined(ParallelConfig(ulysses_degree=ranks, symmetric_memory=memory), device).ulysses
        for name, memory in (("NCCL", False), ("memory", True))
    }
    for channels in arguments.channels:
        options = dist.ProcessGroupNCCL.Options()
        options.config.min_ctas = options.config.max_ctas = channels
        group = dist.new_group(list(range(ranks)), backend="nccl", pg_options=options)
        found[f"NCCL, {channels} channels"] = GroupCollectives(group)
    return found


def run(words: list[str]) -> None:
    """Measures on this rank; the first rank tells."""
    arguments = _arguments(words)
    device = torch.device("cpu") if arguments.toy else device_of(toy=False)
    report = Report(arguments.output if dist.get_rank() == 0 else None)
    report.say(measured_line(device, arguments.rounds, arguments.seed))
    clock, times = RankClock(device), dict[str, list[float]]()
    with torch.inference_mode():
        found = list(candidates(TOY if arguments.toy else FULL, device, arguments))
        for name, call, _ in found:
            call()
            times[name] = []
        for _, (name, call, _) in shuffled_rounds(found, arguments.rounds, arguments.seed):
            times[name].append(clock.milliseconds(call))
    report.say(markdown_table(("what", "ms", "GB/s each way"), [_line(*named, times) for named in found]))


def _line(name: str, call: Call, sent: int, times: dict[str, list[float]]) -> Sequence[str]:
    ms = statistics.median(max(each) for each in of_all_ranks(times[name]))
    return (name, f"{ms:.3f}", f"{sent / ms / 1e6:.0f}" if sent else "")


def main(words: list[str] | None = None) -> None:
    """Starts the ranks."""
    given = sys.argv[1:] if words is None else words
    arguments = _arguments(given)
    on_ranks(run, given, arguments.ranks, toy=arguments.toy)


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--beside", default="4,16", help="numbers of exchanges that run beside the kernel")
    parser.add_argument(
        "--channels", default="16,24,32", help="numbers of channels that NCCL is tried with too"
    )
    parser.add_argument("--toy", action="store_true", help="a small case on CPUs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args(words)
    split_lists(parser, arguments, {"beside": None, "channels": None})
    try:
        arguments.beside, arguments.channels = (
            [int(word) for word in given] for given in (arguments.beside, arguments.channels)
        )
    except ValueError:
        parser.error("--beside and --channels take numbers")
    if arguments.ranks < 2 or min((*arguments.beside, *arguments.channels, 1)) < 1:
        parser.error("--ranks starts at 2, --beside and --channels at 1")
    return arguments


if __name__ == "__main__":
    main()
