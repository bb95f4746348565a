"""A whole forward of a Wan preset, ours beside diffusers' model with the same weights, eager and compiled, in one run.

    python -m benchmarks.wan_forward [--preset wan2.1-t2v-1.3b] [--no-compile] [--whole-peer] [--json FILE]

Seeded weights, 480 x 832, 81 frames, bfloat16, batch 1. diffusers runs with each of its own backends that work here
and the fastest counts. Compiled means torch.compile with inductor on each block, of both models; --whole-peer also
compiles diffusers' model as a whole, which takes minutes. Rounds of all candidates alternate; the median of CUDA-event
timings counts. The target is 0.93 of diffusers' time, eager and compiled.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.machine import machine_line
from benchmarks.wan_models import (
    Forward,
    Row,
    Workload,
    fastest_of_diffusers,
    measure,
    our_forward,
    peer_forward,
    peer_forwards,
    save_weights,
)
from omni_attn.models.wan.presets import WAN_PRESETS

TARGET = 0.93


def main() -> None:
    """Builds the models, compares their outputs, times them, and holds the default against the best of diffusers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="wan2.1-t2v-1.3b", choices=sorted(WAN_PRESETS))
    parser.add_argument("--no-compile", action="store_true", help="eager alone")
    parser.add_argument("--whole-peer", action="store_true", help="also compile diffusers' model as a whole")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "needs an NVIDIA GPU, found none: a forward of 32760 tokens is timed with CUDA events"
        )
    print(machine_line("cuda"))
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        work = Workload(arguments.preset, Path(folder), torch.device("cuda"))
        save_weights(work)
        expected = peer_forward(work, "native")().float()
        rows = measure(candidates(work, compiled=False), expected, compiled=False)
        if not arguments.no_compile:
            compiled = candidates(work, compiled=True, whole_peer=arguments.whole_peer)
            rows += measure(compiled, expected, compiled=True)
    for is_compiled in (False, True):
        print_ratio([row for row in rows if row.compiled == is_compiled])
    if arguments.json:
        report = {"machine": machine_line("cuda"), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1))


def candidates(work: Workload, *, compiled: bool, whole_peer: bool = False) -> dict[str, Forward]:
    """Forwards by name: diffusers with each backend, ours with the platform default and with TORCH_SDPA."""
    found = peer_forwards(work, compiled=compiled)
    if whole_peer:
        found["diffusers _native_cudnn, whole"] = peer_forward(work, "_native_cudnn", compile_whole=True)
    for name, attention in (("platform default", {}), ("TORCH_SDPA", {"default": "TORCH_SDPA"})):
        found[f"ours {name}"] = our_forward(work, attention, compiled=compiled)
    return found


def print_ratio(rows: list[Row]) -> None:
    """A table of candidates, each against the fastest of diffusers."""
    if not rows:
        return
    best = fastest_of_diffusers(rows)
    print("compiled" if rows[0].compiled else "eager", f"(target for the platform default: {TARGET})")
    for row in rows:
        print(
            f"  {row.name:32} {row.milliseconds:8.1f} ms, {row.milliseconds / best:.3f} of diffusers' best, "
            f"relative difference {row.difference:.1e}"
        )


if __name__ == "__main__":
    main()
