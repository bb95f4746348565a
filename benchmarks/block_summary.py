"""BLOCK_SUMMARY_ATTN beside the Triton kernel of h3-sparse-attn, at the same number of selected blocks, in one run.

    python -m benchmarks.block_summary [--cases 124-frames,243-frames] [--topk 64] [--maps random,correlated]
                                       [--rounds N] [--seed N] [--output FILE] [--toy]

Self-attention of MiniMax-H3 (56 heads of 128, bfloat16; see h3_block.py for the cases): blocks of 128 rows, of which
each block attends to the --topk best exactly and to every other one as one key. Both are timed from query, key and
value to the output, with block means and selection. Each is held against float64 over the blocks that it selected
itself; "as exact" is the share of them that float64 means select too. Rounds are shuffled, medians of CUDA-event
timings count, ratios are to the peer.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import device_of, split_lists
from benchmarks.h3_call import CASES, TOY, Calls, JudgedCandidate, Method, dense_methods
from benchmarks.layer_calls import SUMMARY_BACKEND, try_each
from benchmarks.machine import measured_line
from benchmarks.rounds import Candidate, Row, measure
from benchmarks.sampled import best_blocks
from benchmarks.tables import COLUMNS, Report, base_of, markdown_table, ratio, row_cells
from benchmarks.vsa_checks import shared
from benchmarks.vsa_inputs import MAPS, SparseCase
from omni_attn.ops.block_sparse.partition import BlockPartition

BLOCK = 128
ROUNDS = 15


def main(words: list[str] | None = None) -> None:
    """Measures case after case and prints each table as it comes."""
    arguments = _arguments(words)
    device = device_of(toy=arguments.toy)
    report = Report(arguments.output)
    report.say(measured_line(device, arguments.rounds, arguments.seed))
    with torch.no_grad():
        for case in [TOY] if arguments.toy else [CASES[name] for name in arguments.cases]:
            for maps in arguments.maps:
                table(case, maps, arguments, device, report)


def table(
    case: SparseCase, maps: str, arguments: argparse.Namespace, device: torch.device, report: Report
) -> None:
    """Dense attention, the peer and ours on one case and kind of map."""
    inputs = MAPS[maps](case, device, torch.Generator(device).manual_seed(arguments.seed))
    calls = Calls.of(case, inputs)
    peer = Peer(calls, arguments.topk)
    blocks = peer.blocks.num_blocks
    if not 0 < arguments.topk < blocks:
        raise SystemExit(
            f"--topk {arguments.topk}: {case.name} has {blocks} blocks, and some have to be left out"
        )
    # Half a block less than the share: whatever the rounding, exactly so many are kept.
    sparsity = 1 - (arguments.topk - 0.5) / blocks
    spec = {"backend": SUMMARY_BACKEND, "block_sparse": {"sparsity": sparsity}}
    methods = [*dense_methods(device)[:1], Method(name="ours", spec=spec, sparsity=sparsity)]
    found = [*try_each({Peer.name: peer.candidate}), *calls.candidates(methods)]

    def check(candidate: Candidate, row: Row) -> float:
        return (calls if isinstance(candidate, JudgedCandidate) else peer).check(candidate, row)

    rows = measure(found, check, device, rounds=arguments.rounds, seed=arguments.seed)
    base, ours = base_of(rows, "dense"), base_of(rows, "ours")
    report.say(
        f"{case.tokens} rows, {case.heads} heads of {case.head_size}, {maps} maps, {arguments.topk} of {blocks} blocks "
        f"of {BLOCK}:"
    )
    report.say(markdown_table(COLUMNS, [row_cells(row, base) for row in rows]))
    if against := ratio(base_of(rows, "peer"), ours):
        report.say(f"h3-sparse-attn takes {against} times as long as ours.")


class Peer:
    """The Triton kernel of h3-sparse-attn 0.1.0, `h3_sparse_attn.triton_attn.sparse_attention`, with its routing."""

    name = "h3-sparse-attn"

    def __init__(self, calls: Calls, topk: int) -> None:
        self._calls, self._topk = calls, topk
        self.blocks = BlockPartition.in_order(calls.case.tokens, BLOCK, calls.inputs.query.device)

    def candidate(self) -> Candidate:
        """Its call on [B, S, H, D], as its attention processor makes it.

        Raises:
            ImportError: the package is not here.
        """
        kernels: Any = importlib.import_module("h3_sparse_attn.triton_attn")
        query, key, value, _ = self._calls.inputs
        return Candidate(
            name=self.name,
            kind="peer",
            call=lambda: kernels.sparse_attention(query, key, value, self._topk, BLOCK, True),
            selected=self._selected,
        )

    def check(self, candidate: Candidate, row: Row) -> float:
        """The error over the blocks that it routes to; fills in how these agree with those of float64 means."""
        sampled, chosen = self._calls.sampled, self._selected()
        row.as_exact = shared(chosen, best_blocks(sampled.scores(self.blocks), self._topk))
        expected, _ = sampled.over(chosen, self.blocks, summaries=True)
        return sampled.error(candidate.call(), expected)

    def _selected(self) -> torch.Tensor:
        routing: Any = importlib.import_module("h3_sparse_attn.routing")
        indices = routing.route(*self._calls.inputs[:3], self._topk, BLOCK)[2]
        chosen = torch.zeros(
            *indices.shape[:3], self.blocks.num_blocks, dtype=torch.bool, device=indices.device
        )
        return chosen.scatter_(-1, indices.long(), True)


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="124-frames,243-frames", help=f"of {', '.join(CASES)}")
    parser.add_argument("--topk", type=int, default=64, help="blocks that each block attends to exactly")
    parser.add_argument("--maps", default=",".join(MAPS), help=f"of {', '.join(MAPS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument("--toy", action="store_true", help="a small case, which a CPU runs too")
    arguments = parser.parse_args(words)
    split_lists(parser, arguments, {"cases": CASES, "maps": MAPS})
    return arguments


if __name__ == "__main__":
    main()
