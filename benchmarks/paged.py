"""Attention over a paged KV cache: our backends beside the kernels of other packages, in one run.

    python -m benchmarks.paged [--parts chunk,decode,host,graph] [--history 4680,14040,28080] [--page-size 8]
                               [--pages shuffled|consecutive] [--backends default,TRITON_ATTN,FLASH_ATTN:fa3,...]
                               [--no-peers] [--batch 64] [--context 4096] [--decode-page-size 16] [--pixels 128x128]
                               [--rounds N] [--seed N] [--output FILE] [--json FILE] [--toy]

bfloat16, random tensors, pages in random order unless told otherwise. Four parts:

chunk   attention of one chunk of causal Wan 1.3B at 480 x 832, three latent frames of 1560 tokens, over its history and
        itself. TFLOP/s = 4 T L H D / time.
decode  one token of each request of a language model, 32 query heads over 8. GB/s = keys and values once / time.
host    what 40 layers over one page table cost the host in a step: one builder's build, a step after something
        changed, a step of a chunk whose metadata is there, and the first step of a new chunk with its edit of the
        page table; and how often each waits for the device.
graph   one denoising step of causal Wan 1.3B, captured once and replayed, beside the same step launched eagerly.

In the first two the cache holds the new tokens already, for ours and for peers, except in the row "with its write".
Each candidate is held against float64 on sampled rows before it is timed. Rounds of all candidates are shuffled;
medians of CUDA-event timings count, with caches flushed before each. Peers: FlashAttention 3 and 4 with a page table,
FlashInfer's paged wrappers, planned before the first call; "dense" is FlashAttention 3 over the same keys in one piece.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import device_of, split_lists
from benchmarks.machine import measured_line
from benchmarks.paged_calls import DEFAULT, candidates
from benchmarks.paged_graph import COLUMNS as GRAPH_COLUMNS
from benchmarks.paged_graph import graph_cells, graph_rows, held_graph
from benchmarks.paged_inputs import (
    ORDERS,
    TOY_CHUNK,
    TOY_DECODE,
    PagedCase,
    PagedInputs,
    decode_case,
    video_case,
)
from benchmarks.paged_report import (
    DECODE_TARGETS,
    HOST_COLUMNS,
    VIDEO_TARGETS,
    Target,
    call_table,
    held_calls,
    held_host,
    host_cells,
)
from benchmarks.paged_steps import host_rows
from benchmarks.rounds import Row, measure
from benchmarks.tables import Report, markdown_table

PARTS = ("chunk", "decode", "host", "graph")
BACKENDS = (
    DEFAULT,
    "TRITON_ATTN",
    "FLASH_ATTN:fa3",
    "FLASH_ATTN:fa4",
    "FLASHINFER_ATTN:fa3",
    "FLASHINFER_ATTN:fa2",
)
TOY_BACKENDS = (DEFAULT, "TORCH_SDPA")
HISTORIES = (4680, 14040, 28080)
ROUNDS = 15


def main(words: list[str] | None = None) -> None:
    """Measures part after part and prints each table as it comes."""
    arguments = _arguments(words)
    device = device_of(toy=arguments.toy)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report, found = Report(arguments.output), dict[str, Any]()
    line = measured_line(device, arguments.rounds, arguments.seed)
    report.say(line)
    video = [video_case(history, arguments.page_size) for history in arguments.history]
    decode = decode_case(arguments.batch, arguments.context, arguments.decode_page_size)
    if arguments.toy:
        video, decode = [TOY_CHUNK], TOY_DECODE
    with torch.no_grad():
        if "chunk" in arguments.parts:
            for case in video:
                rows = call_rows(case, arguments, device, dtype)
                say_calls(case, rows, () if arguments.toy else VIDEO_TARGETS, dtype, arguments.pages, report)
                found[case.name] = [asdict(row) for row in rows]
        if "decode" in arguments.parts:
            rows = call_rows(decode, arguments, device, dtype)
            say_calls(decode, rows, () if arguments.toy else DECODE_TARGETS, dtype, arguments.pages, report)
            found[decode.name] = [asdict(row) for row in rows]
        if "host" in arguments.parts:
            found["host"] = host_table(video[-1], arguments, device, dtype, report)
        if "graph" in arguments.parts:
            found["graph"] = graph_table(arguments, device, dtype, report)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": line, "parts": found}, indent=1), encoding="utf-8")


def call_rows(
    case: PagedCase, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> list[Row]:
    """Every candidate for one call."""
    inputs = PagedInputs(case, device, dtype, order=arguments.pages, seed=arguments.seed)
    found = candidates(inputs, arguments.backends, peers=not arguments.no_peers)
    return measure(
        found,
        lambda candidate, row: inputs.error(candidate.raster(candidate.call())),
        device,
        rounds=arguments.rounds,
        seed=arguments.seed,
    )


def say_calls(
    case: PagedCase,
    rows: list[Row],
    targets: Iterable[Target],
    dtype: torch.dtype,
    order: str,
    report: Report,
) -> None:
    """The table of one call, and its targets."""
    report.say(f"{case}, {order}:")
    report.say(call_table(case, rows, dtype.itemsize))
    for sentence in held_calls(rows, targets):
        report.say(sentence)


def host_table(
    case: PagedCase, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype, report: Report
) -> list[dict[str, Any]]:
    """Host time of steps and chunks."""
    rows = host_rows(arguments.backends, case, device, dtype, rounds=arguments.rounds, seed=arguments.seed)
    report.say(
        "Host time of 40 layers over one page table, microseconds (times that the device is waited for):"
    )
    report.say(markdown_table(HOST_COLUMNS, map(host_cells, rows)))
    for sentence in () if arguments.toy else held_host(rows):
        report.say(sentence)
    return [asdict(row) for row in rows]


def graph_table(
    arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype, report: Report
) -> list[dict[str, Any]]:
    """Eager steps and replays."""
    preset, pixels = ("wan-tiny", (32, 32)) if arguments.toy else ("wan2.1-t2v-1.3b", arguments.pixels)
    rounds = {"rounds": arguments.rounds, "seed": arguments.seed}
    rows = graph_rows(arguments.backends, preset, pixels, device, dtype, **rounds)
    report.say(
        f"One step of causal {preset}, the second chunk of 3 latent frames of {pixels[0]} x {pixels[1]} pixels:"
    )
    report.say(markdown_table(GRAPH_COLUMNS, map(graph_cells, rows)))
    for sentence in () if arguments.toy else filter(None, map(held_graph, rows)):
        report.say(sentence)
    return [asdict(row) for row in rows]


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--history", default=",".join(map(str, HISTORIES)), help="tokens before the chunk")
    parser.add_argument("--page-size", type=int, default=8, help="of the video's cache, in tokens")
    parser.add_argument("--pages", default=ORDERS[0], choices=ORDERS, help="how they lie in memory")
    parser.add_argument("--backends", help="ours: NAME, NAME:variant or default, with commas between them")
    parser.add_argument("--no-peers", action="store_true", help="leave other packages out")
    parser.add_argument("--batch", type=int, default=64, help="requests that decode")
    parser.add_argument("--context", type=int, default=4096, help="their keys")
    parser.add_argument("--decode-page-size", type=int, default=16)
    parser.add_argument(
        "--pixels", default="128x128", help="height x width of the graph's video, multiples of 16"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--toy", action="store_true", help="a small size, which a CPU runs too")
    arguments = parser.parse_args(words)
    if arguments.backends is None:
        arguments.backends = ",".join(TOY_BACKENDS if arguments.toy else BACKENDS)
    split_lists(parser, arguments, {"parts": PARTS, "history": None, "backends": None})
    try:
        arguments.history = [int(word) for word in arguments.history]
        height, width = map(int, arguments.pixels.split("x"))
    except ValueError as error:
        parser.error(f"--history takes numbers of tokens, --pixels HEIGHTxWIDTH: {error}")
    arguments.pixels = height, width
    if min(height, width) < 16 or height % 16 or width % 16:
        parser.error(f"--pixels {height}x{width}: both are multiples of 16")
    sizes = ("page_size", "batch", "context", "decode_page_size", "rounds")
    if min(*arguments.history, *(getattr(arguments, name) for name in sizes)) < 1:
        parser.error("sizes are positive")
    return arguments


if __name__ == "__main__":
    main()
