"""One sequence over the GPUs of a host: how many times as fast as one of them, beside what was predicted.

    python -m benchmarks.sequence_parallel [--ranks 2] [--parts dense,vsa,step] [--pieces 2,5] [--percent 10]
                                           [--tile 4x8x8] [--compile] [--rounds N] [--output FILE] [--json FILE]
    python -m benchmarks.sequence_parallel --alone [--ranks 2,8,64] [--parts dense,vsa,step,packing] ...

The first form starts a process for each GPU (torchrun does it as well). They exchange through one another's memory, and
once more over NCCL. "dense" is the self-attention of Wan
14B at 720p (75600 tokens, 40 heads of 128, bfloat16) under every strategy, "vsa" the same call at 10 % of the tiles
under Ulysses, with and without a gate, and with MiniMax-H3's override; "step" a forward of Wan 1.3B at 480p. Inputs and
weights are seeded. Every split call's whole output is first held against that of one rank. Rounds of all candidates
alternate; a call begins on all GPUs at once, behind a flush of their caches, and takes as long as its slowest rank; one
rank is the fastest of those that ran the whole call. Medians of CUDA events. Predictions are those of
omni_attn/parallel/cost.py, told how long one rank took in this run.

The second form needs one GPU: it runs the first rank of so many, whose exchanges stand still and take no time, which
times everything around them: copies, half the heads, parts of the keys, merging. The exchanges are added from the
bandwidths of omni_attn/parallel/machines.py; what NCCL takes from kernels that run beside it is not in there. Its
"packing" part times ways to bring tensors into the order of an exchange.

--toy runs small cases on a CPU, on gloo in the first form.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.arguments import device_of, split_lists
from benchmarks.machine import measured_line
from benchmarks.parallel_calls import (
    FULL,
    TOY,
    Candidate,
    Forwards,
    Work,
    attention_candidates,
    candidates,
    inputs,
    model_config,
    splits,
)
from benchmarks.parallel_packing import packing_table
from benchmarks.parallel_ranks import RankClock, joined, on_ranks, still
from benchmarks.parallel_rows import Predict, measure, measured_table, still_table
from benchmarks.tables import Report
from omni_attn.config import ParallelConfig
from omni_attn.parallel.cost import AttentionCall, Prediction, calibrated, predict, predict_step
from omni_attn.parallel.machines import H200

PARTS = ("dense", "vsa", "step", "packing")
DENSE_TARGETS = {"ulysses_degree 2": 1.93, "ring_degree 2": 1.88}
SPARSE_TARGETS = {"ulysses_degree 2": 1.85}
STEP_TARGETS = {"ulysses_degree 2": 1.7}


def main(words: list[str] | None = None) -> None:
    """Starts the ranks, or measures alone."""
    arguments = _arguments(words)
    given = sys.argv[1:] if words is None else words
    if arguments.alone:
        run(given)
    else:
        on_ranks(run, given, arguments.ranks[0], toy=arguments.toy)


def run(words: list[str]) -> None:
    """Measures group after group on this rank; the first rank tells."""
    arguments = _arguments(words)
    first = not dist.is_initialized() or dist.get_rank() == 0
    device = torch.device("cpu") if arguments.toy else device_of(toy=False)
    report, found = Report(arguments.output if first else None), []
    report.say(measured_line(device, arguments.rounds, arguments.seed))
    join = still if arguments.alone else partial(joined, device=device)
    with torch.inference_mode():
        for group in _groups(arguments, device):
            if arguments.toy:  # targets are those of the real sizes
                group.candidates[:] = [replace(candidate, target=None) for candidate in group.candidates]
            rows = measure(
                group.candidates,
                group.predict,
                join,
                device,
                rounds=arguments.rounds,
                seed=arguments.seed,
                still=arguments.alone,
            )
            report.say(f"{group.name}:")
            report.say((still_table if arguments.alone else measured_table)(rows))
            found.append({"group": group.name, "rows": [asdict(row) for row in rows]})
        if arguments.alone and "packing" in arguments.parts:
            work = TOY if arguments.toy else FULL
            for ranks in arguments.ranks:
                report.say(f"Into the order of an exchange over {ranks} ranks, and back:")
                report.say(packing_table(work, device, ranks, arguments.rounds, arguments.seed))
    if arguments.json and first:
        arguments.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


class _Group(NamedTuple):
    name: str
    candidates: list[Candidate]
    predict: Predict


def _groups(arguments: argparse.Namespace, device: torch.device) -> Iterator[_Group]:
    work = TOY if arguments.toy else FULL
    if arguments.tile:
        work = replace(work, tile=arguments.tile)
    sizes = f"{work.tokens} tokens, {work.heads} heads of {work.head_size}"
    if "dense" in arguments.parts:
        configs = _splits(arguments, work.heads)
        whole = inputs(work, device, 3)
        found = attention_candidates(work, whole, None, configs, DENSE_TARGETS)
        yield _Group(f"Self-attention, {sizes}, the platform's default", found, _predicting(work.call()))
    if "vsa" in arguments.parts:
        yield from _sparse_groups(work, arguments, device)
    if "step" in arguments.parts:
        yield _step_group(work, arguments, device)


def _sparse_groups(work: Work, arguments: argparse.Namespace, device: torch.device) -> Iterator[_Group]:
    sparsity = 1 - arguments.percent / 100
    tile = "x".join(map(str, work.tile))
    spec = {
        "backend": "FASTVIDEO_VSA",
        "fastvideo_vsa": {"sparsity": sparsity, "tile_size": list(work.tile)},
    }
    configs = _splits(arguments, work.heads, ulysses_alone=True)
    for words, tensors, overridden in (
        ("gate", 4, False),
        ("no gate", 3, False),
        ("gate, MiniMax-H3's override", 4, True),
    ):
        whole = inputs(work, device, tensors)
        found = attention_candidates(work, whole, spec, configs, SPARSE_TARGETS, overridden=overridden)
        call = work.call(kept=arguments.percent / 100, gated=tensors > 3)
        yield _Group(f"VSA, {arguments.percent:g} % of {tile}, {words}", found, _predicting(call))


def _step_group(work: Work, arguments: argparse.Namespace, device: torch.device) -> _Group:
    config = model_config(work)
    grid = config.token_grid(*work.latents)
    own = replace(work, grid=grid, heads=config.num_attention_heads, head_size=config.attention_head_dim)
    (alone, *_) = attention_candidates(own, inputs(own, device, 3), None, [], {})
    call, _ = alone.make(None)
    call()
    attention_seconds = RankClock(device).milliseconds(call) / 1e3
    machine = calibrated(H200, own.call(), attention_seconds)
    output_bytes = own.tokens * config.out_channels * prod(config.patch_size) * work.dtype.itemsize

    def predict_forward(config_: ParallelConfig, seconds: float) -> Prediction:
        rest = max(0.0, seconds - config.num_layers * attention_seconds)
        return predict_step(
            predict(own.call(), config_, machine),
            machine,
            layers=config.num_layers,
            rest_seconds=rest,
            gathered_bytes=output_bytes,
        )

    configs = _splits(arguments, own.heads)
    forwards = Forwards(work, device, compiled=arguments.compile)
    found = candidates(forwards, configs, STEP_TARGETS)
    found.insert(1, forwards.yardstick())
    how = "compiled" if arguments.compile else "eager"
    return _Group(
        f"A forward of {work.preset}, {own.tokens} tokens, {how}; attention of one layer takes "
        f"{1e3 * attention_seconds:.2f} ms on one rank",
        found,
        predict_forward,
    )


def _splits(
    arguments: argparse.Namespace, heads: int, *, ulysses_alone: bool = False
) -> list[ParallelConfig]:
    # Compiled code and exchanges that stand still know one way, and CPUs have nothing to choose from.
    ways = (None,) if arguments.toy else (False,) if arguments.alone or arguments.compile else (None, False)
    found = []
    for ranks in arguments.ranks:
        found += splits(ranks, heads, arguments.pieces, ulysses_alone=ulysses_alone, ways=ways)
    return found


def _predicting(call: AttentionCall) -> Predict:
    def predicted(config: ParallelConfig, seconds: float) -> Prediction:
        return predict(call, config, calibrated(H200, call, seconds))

    return predicted


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="", help="processes; with --alone several numbers")
    parser.add_argument("--parts", default="dense,vsa,step", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--alone", action="store_true", help="one GPU, exchanges stand still")
    parser.add_argument(
        "--pieces", default="2,5", help="numbers of pieces of heads that Ulysses is tried with too"
    )
    parser.add_argument("--percent", type=float, default=10.0, help="share of the tiles that VSA keeps")
    parser.add_argument("--tile", help="of VSA, for instance 4x4x4")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of the forward")
    parser.add_argument("--toy", action="store_true", help="small cases on a CPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args(words)
    split_lists(parser, arguments, {"ranks": None, "parts": PARTS, "pieces": None})
    try:
        arguments.pieces = [int(word) for word in arguments.pieces]
        arguments.ranks = [int(word) for word in arguments.ranks or ["2"]]
        arguments.tile = tuple(int(word) for word in arguments.tile.split("x")) if arguments.tile else None
    except ValueError:
        parser.error("--ranks and --pieces take numbers, and --tile three with x between them")
    if min((*arguments.pieces, 2)) < 2:
        parser.error("--pieces starts at 2: without pieces Ulysses is there anyway")
    if min(arguments.ranks) < 2 or (arguments.tile is not None and len(arguments.tile) != 3):
        parser.error("--ranks starts at 2, and --tile is three numbers with x between them")
    if len(arguments.ranks) > 1 and not arguments.alone:
        parser.error(f"--ranks {arguments.ranks} at once needs --alone: processes are started once")
    if "packing" in arguments.parts and not arguments.alone:
        parser.error("--parts packing needs --alone")
    return arguments


if __name__ == "__main__":
    main()
