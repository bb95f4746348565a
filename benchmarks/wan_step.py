"""What sparse self-attention buys in a whole forward of a Wan preset.

Our dense default, video sparse attention at two tile sizes, and diffusers' own model, with the same weights, eager and
compiled, in one run:

    python -m benchmarks.wan_step [--preset wan2.1-t2v-1.3b] [--percent 10] [--variant NAME] [--no-gates]
                                  [--no-compile] [--rounds N] [--json FILE]

The conditions of wan_forward.py: seeded weights, 480 x 832, 81 frames, bfloat16, batch 1, each block compiled with
inductor, alternating rounds, medians of CUDA-event timings. FASTVIDEO_VSA keeps so many percent of the tiles, without
gates and with seeded ones in the checkpoint, whose projection and coarse branch then cost time as well. Weights are not
trained, so the difference from diffusers' output says what the sparse path leaves out of attention that is nearly
uniform, and nothing about the quality of a video.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine_line
from benchmarks.wan_models import (
    ROUNDS,
    Forward,
    Row,
    Workload,
    fastest_of_diffusers,
    measure,
    our_forward,
    peer_forward,
    peer_forwards,
    save_gates,
    save_weights,
)
from omni_attn.errors import OmniAttnError
from omni_attn.models.wan.presets import WAN_PRESETS

DENSE = "ours platform default"
TILES = ((4, 4, 4), (4, 8, 8))


def main() -> None:
    """Measures on a GPU, prints the tables, and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="wan2.1-t2v-1.3b", choices=sorted(WAN_PRESETS))
    parser.add_argument("--percent", type=float, default=10.0, help="share of the tiles that is kept")
    parser.add_argument("--variant", help="of FASTVIDEO_VSA, in place of the automatic one")
    parser.add_argument("--no-gates", action="store_true", help="leave the checkpoint with gates out")
    parser.add_argument("--no-compile", action="store_true", help="eager alone")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "needs an NVIDIA GPU, found none: a forward of 32760 tokens is timed with CUDA events"
        )
    print(machine_line("cuda"))
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(arguments.preset, Path(folder) / "weights", torch.device("cuda"))
        rows = run(work, sparse_specs(arguments.percent, arguments.variant), arguments)
    print_rows(rows)
    if arguments.json:
        report = {
            "machine": machine_line("cuda"),
            "percent": arguments.percent,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def sparse_specs(
    percent: float, variant: str | None, tiles: tuple[tuple[int, int, int], ...] = TILES
) -> dict[str, dict[str, Any]]:
    """Specs of self-attention by name."""
    specs = {}
    for tile in tiles:
        spec: dict[str, Any] = {
            "backend": "FASTVIDEO_VSA",
            "fastvideo_vsa": {"sparsity": 1 - percent / 100, "tile_size": list(tile)},
        }
        specs[f"{percent:g} % of {'x'.join(map(str, tile))}"] = spec | (
            {"variant": variant} if variant else {}
        )
    return specs


def run(work: Workload, specs: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> list[Row]:
    """All candidates, eager and then compiled."""
    gated = None if arguments.no_gates else work.folder.with_name("gated")
    rows: list[Row] = []
    with torch.inference_mode():
        save_weights(work)
        if gated is not None:
            save_gates(work, gated)
        expected = peer_forward(work, "native")().float()
        for compiled in (False,) if arguments.no_compile else (False, True):
            found = candidates(work, specs, gated, compiled=compiled)
            rows += measure(found, expected, compiled=compiled, rounds=arguments.rounds)
    return rows


def candidates(
    work: Workload, specs: dict[str, dict[str, Any]], gated: Path | None, *, compiled: bool
) -> dict[str, Forward]:
    """Forwards by name; what cannot be built here is named with the reason."""
    found = peer_forwards(work, compiled=compiled)
    found[DENSE] = our_forward(work, {}, compiled=compiled)
    for name, spec in specs.items():
        for words, folder in (("", work.folder), (", gates", gated)):
            if folder is None:
                continue
            try:
                found[f"ours {name}{words}"] = our_forward(
                    work, {"per_role": {"self": spec}}, compiled=compiled, folder=folder
                )
            except OmniAttnError as error:
                print(f"ours {name}{words}: {error}")
    return found


def print_rows(rows: list[Row]) -> None:
    """A table each for eager and compiled: how much faster than our dense default and than the best of diffusers."""
    for compiled in (False, True):
        table = [row for row in rows if row.compiled == compiled]
        if not table:
            continue
        dense = next(row.milliseconds for row in table if row.name == DENSE)
        best = fastest_of_diffusers(table)
        print("compiled" if compiled else "eager")
        for row in table:
            print(
                f"  {row.name:32} {row.milliseconds:8.1f} ms, {dense / row.milliseconds:.2f} times as fast as our "
                f"dense default, {best / row.milliseconds:.2f} times diffusers' best, "
                f"relative difference {row.difference:.1e}"
            )


if __name__ == "__main__":
    main()
