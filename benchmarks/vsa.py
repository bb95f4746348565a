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
import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.arguments import split_lists, this_device
from benchmarks.machine import machine_line
from benchmarks.rounds import Candidate, Row, measure
from benchmarks.vsa_candidates import EXECUTORS, Setting, candidates
from benchmarks.vsa_checks import Reference, neighbour_overlap, shared
from benchmarks.vsa_inputs import LARGE_CASES, MAPS, SparseCase, case_named
from benchmarks.vsa_report import Group, print_group
from omni_attn.errors import ConfigError
from omni_attn.ops.block_sparse.selectors import blocks_kept
from omni_attn.tuning.clocks import method_of

ROUNDS = 15
CPU_TOKENS = 4096


def main(words: list[str] | None = None) -> None:
    """Measures group after group and prints each as it comes."""
    arguments = _arguments(words)
    device = this_device()
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
    split_lists(parser, arguments, {"cases": None, "percent": None, "maps": MAPS, "executors": None})
    try:
        arguments.cases = [case_named(name) for name in arguments.cases]
        arguments.percent = [float(word) for word in arguments.percent]
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
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
        rows = measure(
            candidates(setting, arguments.executors, with_peers=not arguments.no_peers),
            partial(check, reference=reference, exact=exact),
            device,
            rounds=arguments.rounds,
            seed=arguments.seed,
        )
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


def check(candidate: Candidate, row: Row, reference: Reference, exact: torch.Tensor) -> float:
    """The error over the candidate's own tiles; fills in how these agree with the exact ones."""
    expected = reference.dense
    if candidate.selected is not None:
        own = candidate.selected()
        row.as_exact = shared(own, exact)
        expected, _ = reference.sparse(own)
    return reference.error(candidate.raster(candidate.call()), expected)


if __name__ == "__main__":
    main()
