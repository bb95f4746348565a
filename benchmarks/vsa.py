"""Video sparse attention: our executors and layer beside FastVideo and dense FlashAttention 3, in one run.

    python -m benchmarks.vsa [--cases NAME,...] [--percent 5,10,20] [--maps random,correlated] [--executors NAME,...]
                             [--no-peers] [--rounds N] [--seed N] [--json FILE]

A case is a named shape and a tile, "wan-14b-720p/4x8x8". bfloat16; query, key, value and gate come in raster order and
the output leaves in it. FastVideo is timed with its tile and untile passes ("with packing"), and, as its kernels are
usually measured, from tile order to tile order. Maps of tiles follow from the inputs: random, or with query and key
correlated in space and time (vsa_inputs.py).

Before it is timed, each candidate is held against a float64 reference on 64 query rows, masked by the tiles which the
candidate itself chose (FastVideo rounds its means to bfloat16, which moves near ties); "as exact" is the share of them
that float64 means choose too. Rounds of all candidates alternate; the median of CUDA-event timings counts, with
caches flushed before each, and the host so far ahead that launching is no part of the time. "Pack" is the executor's
packing with block means, "select" scores, top-k and coarse attention, "attend" the rest. Memory is the peak above the
inputs, output included.

A run of about two minutes: --cases wan-1.3b-480p/4x8x8,wan-1.3b-480p/4x4x4 --percent 10 --rounds 7
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.machine import machine_line
from benchmarks.vsa_candidates import EXECUTORS, Candidate, Setting, candidates
from benchmarks.vsa_checks import Reference, neighbour_overlap, shared, watched
from benchmarks.vsa_inputs import LARGE_CASES, MAPS, SparseCase, case_named
from benchmarks.vsa_report import Group, Row, print_group
from omni_attn.errors import ConfigError
from omni_attn.ops.block_sparse.selectors import blocks_kept
from omni_attn.tuning.clocks import clock_for, method_of, peak_bytes

ROUNDS = 15
# Dense attention takes longer than all else and serves as a base only: timed once in so many rounds.
DENSE_EVERY = 4
# Past this a result is no bfloat16 rounding any more, and is not timed.
MAX_ERROR = 2e-2
CPU_TOKENS = 4096
# About 2 ms of an H200: the host has queued all launches of a call, of whichever candidate, before the call begins.
FLUSHES = 32


def main(words: list[str] | None = None) -> None:
    """Measures group after group and prints each as it comes."""
    arguments = _arguments(words)
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    machine = machine_line(device.type)
    print(
        f"{machine}\nalternating rounds: {arguments.rounds}, medians; {method_of(device)}; seed {arguments.seed}"
    )
    groups = []
    with torch.no_grad():
        for case in arguments.cases:
            if device.type == "cpu" and case.tokens > CPU_TOKENS:
                raise SystemExit(f"needs an NVIDIA GPU, found none: {case} is too much for a CPU")
            for maps in arguments.maps:
                for group in measure_case(case, maps, arguments, device):
                    groups.append(group)
                    print_group(group)
    if arguments.json:
        report = {
            "machine": machine,
            "method": method_of(device),
            "groups": [asdict(group) for group in groups],
        }
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(LARGE_CASES), help="shape/tile, with commas between them")
    parser.add_argument("--percent", default="5,10,20", help="shares of the tiles that are kept")
    parser.add_argument("--maps", default=",".join(MAPS), help=f"of {', '.join(MAPS)}")
    parser.add_argument("--executors", default=",".join(EXECUTORS), help="also: torch, on small cases")
    parser.add_argument("--no-peers", action="store_true", help="leave FastVideo's own calls out")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args(words)
    for name in ("cases", "percent", "maps", "executors"):
        setattr(arguments, name, [word for word in getattr(arguments, name).split(",") if word])
    try:
        arguments.cases = [case_named(name) for name in arguments.cases]
        arguments.percent = [float(word) for word in arguments.percent]
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    if unknown := set(arguments.maps) - set(MAPS):
        parser.error(f"no such maps: {', '.join(sorted(unknown))}. Maps: {', '.join(MAPS)}")
    if not all(0 < percent <= 100 for percent in arguments.percent):
        parser.error("--percent takes numbers above 0 and up to 100")
    return arguments


def measure_case(
    case: SparseCase, maps: str, arguments: argparse.Namespace, device: torch.device
) -> Iterable[Group]:
    """The groups of one case and kind of map, on the same fresh inputs."""
    inputs = MAPS[maps](case, device, torch.Generator(device).manual_seed(arguments.seed))
    reference = Reference(inputs, case.tiles(device), case.scale)
    for percent in arguments.percent:
        sparsity = 1 - percent / 100
        setting = Setting(case, inputs, sparsity, blocks_kept(sparsity, case.num_tiles))
        exact = reference.exact_map(setting.topk)
        rows = measure(setting, reference, exact, arguments)
        yield Group(
            case=case.name,
            grid=case.grid,
            tile=case.tile,
            heads=case.heads,
            maps=maps,
            percent=percent,
            topk=setting.topk,
            tiles=case.num_tiles,
            overlap=neighbour_overlap(exact),
            mass=reference.sparse(exact)[1],
            rows=rows,
        )


def measure(
    setting: Setting, reference: Reference, exact: torch.Tensor, arguments: argparse.Namespace
) -> list[Row]:
    """Errors and memory first, then rounds that alternate between the candidates that are right."""
    rows, right = [], list[tuple[Candidate, Row]]()
    for found in candidates(setting, arguments.executors, with_peers=not arguments.no_peers):
        if isinstance(found, tuple):
            rows.append(Row(found[0], "absent", problem=_first_line(found[1])))
            continue
        row = Row(found.name, found.kind)
        rows.append(row)
        try:
            check(found, row, reference, exact, setting.device)
        except Exception as error:  # a kernel may raise anything; the others are still measured
            row.problem = _first_line(error)
        if not row.problem:
            right.append((found, row))
    clock = clock_for(setting.device, FLUSHES)
    shuffled, generator = list(right), random.Random(arguments.seed)
    for number in range(arguments.rounds):
        generator.shuffle(
            shuffled
        )  # a kernel leaves its clock to the next one: on an H200, up to 11 % of the time
        for candidate, row in shuffled:
            if candidate.kind != "dense" or number % DENSE_EVERY == 0:
                row.rounds.append(clock.milliseconds(candidate.call))
    for candidate, row in right:
        row.milliseconds = statistics.median(row.rounds)
        row.phases = _phases(candidate, setting.device, arguments.rounds)
    return rows


def check(
    candidate: Candidate, row: Row, reference: Reference, exact: torch.Tensor, device: torch.device
) -> None:
    """Fills in the error over the candidate's own tiles, how they agree with the exact ones, and its memory."""
    expected = reference.dense
    if candidate.selected is not None:
        own = candidate.selected()
        row.as_exact = shared(own, exact)
        expected, _ = reference.sparse(own)
    error = reference.error(candidate.raster(candidate.call()), expected)
    if not error <= MAX_ERROR:  # NaN is no number either
        row.problem = f"wrong numbers: error {error:.1e}, at most {MAX_ERROR:.0e} passes"
        return
    row.error = error
    candidate.release()
    gc.collect()
    row.peak_bytes = peak_bytes(candidate.call, device)


def _phases(candidate: Candidate, device: torch.device, rounds: int) -> dict[str, float]:
    """Medians over some calls, each behind a flush."""
    if candidate.executor is None:
        return {}
    clock, found = clock_for(device, FLUSHES), list[dict[str, float]]()
    for _ in range(min(rounds, 5)):
        with watched(candidate.executor, device) as watch:
            clock.milliseconds(candidate.call)
            found.append(watch.phases())
    return {name: statistics.median(phases[name] for phases in found) for name in found[0]}


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160] if text else 'no text'}"


if __name__ == "__main__":
    main()
