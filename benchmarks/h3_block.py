"""One block of MiniMax-H3 at its real size: dense attention beside video sparse attention and the methods on blocks.

    python -m benchmarks.h3_block [--parts call,block] [--case NAME] [--sparsity 0.8,0.9] [--backends NAME,...]
                                  [--tiles 4x4x4,4x8x8] [--variants triton,fa3] [--maps random,correlated]
                                  [--rounds N] [--no-compile] [--output FILE] [--toy]

768 x 1344 pixels and 124 frames: 37740 rows, of which 30 are text and 414 audio; hidden size 5376, 56 heads of 128;
bfloat16, seeded. "call" is the attention call alone, from the sequence's order to the sequence's order, "block" the
whole transformer block with seeded weights, ours and diffusers', eager and compiled. Video sparse attention (VSA) keeps
so large a share of the video's tiles beside all rows before the video, with a gate and without one; RAINFUSION_ATTN and
BLOCK_SUMMARY_ATTN keep that share of blocks of 128 rows.

Before a call is timed, it is held against float64 on 64 query rows: exact attention over the tiles that it selected,
plus its gated coarse term, or plus one key for each block that it left out. "As exact" is the share of its selection
that float64 means make too. Rounds of all candidates are shuffled; medians of CUDA-event timings count, with caches
flushed before each. Ratios are to the first dense row. Maps are random, or follow from query and key that are
correlated in space and time.

A block's weights are seeded, not trained: "difference" is that of its whole output from ours with the platform's
default, and says nothing about quality.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch._dynamo import config as dynamo_config

from benchmarks.arguments import device_of, split_lists
from benchmarks.h3_call import (
    BACKENDS,
    CASES,
    PLATFORM_DEFAULT,
    TOY,
    Calls,
    Method,
    dense_methods,
    sparse_methods,
)
from benchmarks.h3_models import BlockWork, our_block, peer_blocks, save_block
from benchmarks.machine import measured_line
from benchmarks.rounds import first_line, measure
from benchmarks.tables import COLUMNS, Report, base_of, markdown_table, ratio, row_cells
from benchmarks.vsa_inputs import MAPS, SparseCase
from benchmarks.wan_models import Forward, fastest_of_diffusers
from benchmarks.wan_models import Row as ForwardRow
from benchmarks.wan_models import measure as measure_forwards
from omni_attn.errors import OmniAttnError
from omni_attn.ops.video_tiles import Extent

PARTS = ("call", "block")
BLOCK_COLUMNS = ("block", "ms", "our dense default / ms", "diffusers' best / ms", "difference")
ROUNDS = 9
# The fastest of these rows is to be so many times as fast as dense FlashAttention 3.
TARGET_ROWS, TARGET = "VSA 0.9", 3.5


def main(words: list[str] | None = None) -> None:
    """Measures part after part and prints each table as it comes."""
    arguments = _arguments(words)
    device = device_of(toy=arguments.toy)
    case = TOY if arguments.toy else CASES[arguments.case]
    report = Report(arguments.output)
    report.say(measured_line(device, arguments.rounds, arguments.seed))
    methods = dense_methods(device)
    for sparsity in arguments.sparsity:
        methods += sparse_methods(sparsity, arguments.backends, arguments.tiles, arguments.variants)
    with torch.no_grad():
        if "call" in arguments.parts:
            for maps in arguments.maps:
                call_table(case, maps, methods, arguments, device, report)
        if "block" in arguments.parts:
            block_table(case, methods, arguments, device, report)


def call_table(
    case: SparseCase,
    maps: str,
    methods: list[Method],
    arguments: argparse.Namespace,
    device: torch.device,
    report: Report,
) -> None:
    """The attention call on one kind of map."""
    calls = Calls.of(case, MAPS[maps](case, device, torch.Generator(device).manual_seed(arguments.seed)))
    rows = measure(
        calls.candidates(methods), calls.check, device, rounds=arguments.rounds, seed=arguments.seed
    )
    base = base_of(rows, "dense")
    report.say(
        f"Attention call, {case.tokens} rows, grid {' x '.join(map(str, case.grid))}, {case.heads} heads of "
        f"{case.head_size}, {maps} maps:"
    )
    report.say(markdown_table(COLUMNS, [row_cells(row, base) for row in rows]))
    judged = [row for row in rows if row.name.startswith(f"{TARGET_ROWS},") and row.milliseconds]
    if base and judged:
        best = min(judged, key=lambda row: row.milliseconds or 0.0)
        factor = base / (best.milliseconds or base)
        missed = "" if factor >= TARGET else ", missed"
        report.say(f"{best.name} is {factor:.2f} times as fast as dense attention (target {TARGET}{missed}).")


def block_table(
    case: SparseCase,
    methods: list[Method],
    arguments: argparse.Namespace,
    device: torch.device,
    report: Report,
) -> None:
    """The whole block: diffusers' with its own attention backends, ours with each method."""
    with tempfile.TemporaryDirectory() as folder:
        preset, backend = ("minimax-h3-tiny", "eager") if arguments.toy else ("minimax-h3", "inductor")
        work = BlockWork(preset, case, Path(folder) / "weights", device, backend)
        save_block(work)
        expected = our_block(work, None)().float()
        for compiled in (False,) if arguments.no_compile else (False, True):
            forwards = peer_blocks(work, compiled=compiled) | our_blocks(work, methods, compiled=compiled)
            # All our blocks share their code, so that dynamo takes them for one that changes all the time.
            with dynamo_config.patch(recompile_limit=2 * len(forwards)):
                found = measure_forwards(forwards, expected, compiled=compiled, rounds=arguments.rounds)
            report.say(
                f"Block, {'compiled' if compiled else 'eager'}, {case.tokens} rows, hidden size "
                f"{work.config.hidden_size}, {work.config.num_attention_heads} heads:"
            )
            report.say(markdown_table(BLOCK_COLUMNS, block_rows(found)))


def our_blocks(work: BlockWork, methods: list[Method], *, compiled: bool) -> dict[str, Forward]:
    """Our block by method; what cannot be built here is named with the reason."""
    found = {}
    for method in methods:
        try:
            found[f"ours, {method.label}"] = our_block(
                work, method.spec, gated=method.gated, compiled=compiled
            )
        except OmniAttnError as error:
            print(f"ours, {method.label}: {first_line(error)}")
    return found


def block_rows(rows: list[ForwardRow]) -> list[list[str]]:
    """Times, and how many times as fast a row is as our platform default and as the fastest of diffusers."""
    dense = next(row.milliseconds for row in rows if row.name == f"ours, {PLATFORM_DEFAULT}")
    peer = fastest_of_diffusers(rows)
    return [
        [
            row.name,
            f"{row.milliseconds:.2f}",
            ratio(dense, row.milliseconds),
            ratio(peer, row.milliseconds),
            f"{row.difference:.1e}",
        ]
        for row in rows
    ]


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--case", default=next(iter(CASES)), choices=CASES)
    parser.add_argument("--sparsity", default="0.8,0.9")
    parser.add_argument("--backends", default=",".join(BACKENDS), help=f"of {', '.join(BACKENDS)}")
    parser.add_argument("--tiles", default="4x4x4,4x8x8")
    parser.add_argument("--variants", default="triton,fa3", help="of FASTVIDEO_VSA")
    parser.add_argument("--maps", default=",".join(MAPS), help=f"of {', '.join(MAPS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="blocks in eager mode alone")
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument("--toy", action="store_true", help="a small case, which a CPU runs too")
    arguments = parser.parse_args(words)
    known = {"parts": PARTS, "maps": MAPS, "backends": BACKENDS}
    split_lists(parser, arguments, {**known, "variants": None, "sparsity": None, "tiles": None})
    try:
        arguments.sparsity = [float(word) for word in arguments.sparsity]
        arguments.tiles = [_tile(word) for word in arguments.tiles]
    except ValueError as error:
        parser.error(str(error))
    if not all(0 < sparsity < 1 for sparsity in arguments.sparsity):
        parser.error("--sparsity takes numbers between 0 and 1")
    return arguments


def _tile(word: str) -> Extent:
    extents = [int(number) for number in word.split("x")]
    if len(extents) != 3 or min(extents) < 1:
        raise ValueError(f"--tiles {word}: needs three positive numbers, for instance 4x8x8")
    frames, rows, columns = extents
    return frames, rows, columns


if __name__ == "__main__":
    main()
