"""Selection regret: how the platform default compares with the fastest exact backend, on shapes of diffusion models.

    python -m benchmarks.dense [--shapes NAME,...] [--rounds N] [--json FILE]

A thin script over omni_attn.tuning, which also serves `omni-attn bench`: rounds of all backends alternate, and the
median of CUDA-event timings counts. Targets: default / best at least 0.95 on each shape and 0.97 on average. The
default orders in omni_attn/platforms/cuda.py rest on this script.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from omni_attn.platforms import current_omni_platform
from omni_attn.tuning.bench import ROUNDS, ShapeResults, bench, mean_default_ratio
from omni_attn.tuning.clocks import method_of
from omni_attn.tuning.machine import machine_line
from omni_attn.tuning.shapes import LARGE, shapes_named

EACH, MEAN = 0.95, 0.97


def main() -> None:
    """Measures, prints each shape as it comes, and the ratios with their targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(LARGE), help="named shapes, with commas between them")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs an NVIDIA GPU, found none: these shapes are timed with CUDA events")
    device = torch.device("cuda", torch.cuda.current_device())
    platform = current_omni_platform(device)
    machine = f"{machine_line(platform.device)}, bfloat16"
    print(f"{machine}\nalternating rounds: {arguments.rounds}, medians; {method_of(device)}")
    found = []
    shapes = shapes_named(arguments.shapes.split(","))
    for results in bench(shapes, platform, device, "bfloat16", rounds=arguments.rounds):
        found.append(results)
        print_shape(results)
    print_ratios(found)
    if arguments.json:
        report = {"machine": machine, "shapes": [results.to_dict() for results in found]}
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def print_shape(results: ShapeResults) -> None:
    """One line per backend: its numbers, or why it has none."""
    print(f"\n{results.shape.name}: {results.shape}")
    for row in results.results:
        if row.milliseconds is None:
            print(f"  {row.label:28} {row.status}: {row.reason}")
            continue
        marks = ["default"] * (row.label == results.default) + ["wrong numbers"] * row.is_broken
        marks += [str(row.candidate.numerics)] * (row.candidate.numerics != "exact")
        memory = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:8.1f} MiB"
        print(
            f"  {row.label:28} {row.milliseconds:9.3f} ms {row.tflops:7.1f} TFLOP/s  error {row.error:.2e} "
            f"{memory}  {', '.join(marks)}"
        )


def print_ratios(found: list[ShapeResults]) -> None:
    """default / best of each shape, and their mean."""
    print("\ndefault / fastest exact")
    for results in found:
        ratio, best = results.default_ratio, results.best
        if ratio is None or best is None:
            print(f"  {results.shape.name:28} the default ({results.default or 'none'}) was not timed")
            continue
        print(f"  {results.shape.name:28} {_held(ratio, EACH)}  {results.default} against {best.label}")
    mean = mean_default_ratio(found)
    if mean is not None:
        print(f"  {'mean':28} {_held(mean, MEAN)}")


def _held(ratio: float, target: float) -> str:
    return f"{ratio:.3f} (target {target}{'' if ratio >= target else ', missed'})"


if __name__ == "__main__":
    main()
