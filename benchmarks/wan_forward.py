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
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine_line
from omni_attn import attention_report, use_attention_config
from omni_attn.models.wan.config import WAN_PRESETS
from omni_attn.models.wan.model import WanModel

ROUNDS = 7
FRAMES, HEIGHT, WIDTH = 21, 60, 104  # latents of 81 frames of 480 x 832
TEXT_TOKENS = 512
TOKENS = FRAMES * (HEIGHT // 2) * (WIDTH // 2)
PEER_BACKENDS = ("native", "_native_cudnn", "_flash_3")
TARGET = 0.93

Forward = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One candidate: median milliseconds, and how far its output is from diffusers' native eager one."""

    name: str
    compiled: bool
    milliseconds: float
    difference: float


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
        inputs = save_weights(arguments.preset, folder)
        expected = peer_forward(folder, inputs, "native")().float()
        rows = measure(candidates(folder, inputs, compiled=False), expected, compiled=False)
        if not arguments.no_compile:
            compiled = candidates(folder, inputs, compiled=True, whole_peer=arguments.whole_peer)
            rows += measure(compiled, expected, compiled=True)
    for is_compiled in (False, True):
        print_ratio([row for row in rows if row.compiled == is_compiled])
    if arguments.json:
        report = {"machine": machine_line("cuda"), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1))


def save_weights(preset: str, folder: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes seeded weights as diffusers does, and gives latents, timestep and text for one forward."""
    from diffusers import WanTransformer3DModel

    config = WAN_PRESETS[preset].transformer
    torch.manual_seed(0)
    with torch.device("cuda"):
        peer = WanTransformer3DModel(**{field.name: getattr(config, field.name) for field in fields(config)})
    peer.save_pretrained(folder)
    latents = torch.randn(1, config.in_channels, FRAMES, HEIGHT, WIDTH, device="cuda", dtype=torch.bfloat16)
    text = torch.randn(1, TEXT_TOKENS, config.text_dim, device="cuda", dtype=torch.bfloat16)
    return latents, torch.tensor([500.0], device="cuda"), text


def candidates(
    folder: str, inputs: tuple[torch.Tensor, ...], *, compiled: bool, whole_peer: bool = False
) -> dict[str, Forward]:
    """Forwards by name: diffusers with each backend, ours with the platform default and with TORCH_SDPA."""
    found: dict[str, Forward] = {}
    for backend in PEER_BACKENDS:
        try:
            forward = peer_forward(folder, inputs, backend, compile_blocks=compiled)
            forward()
        except Exception as error:
            print(f"diffusers {backend}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        else:
            found[f"diffusers {backend}"] = forward
    if whole_peer:
        found["diffusers _native_cudnn, whole"] = peer_forward(
            folder, inputs, "_native_cudnn", compile_whole=True
        )
    for name, attention in (("platform default", {}), ("TORCH_SDPA", {"default": "TORCH_SDPA"})):
        found[f"ours {name}"] = our_forward(folder, inputs, attention, compiled=compiled)
    return found


def peer_forward(
    folder: str,
    inputs: tuple[torch.Tensor, ...],
    backend: str,
    *,
    compile_blocks: bool = False,
    compile_whole: bool = False,
) -> Forward:
    """diffusers' model with one of its attention backends."""
    from diffusers import WanTransformer3DModel

    model: Any = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16).to("cuda").eval()
    model.set_attention_backend(backend)
    if compile_blocks:
        for block in model.blocks:
            block.compile()
    call = torch.compile(model) if compile_whole else model
    latents, timestep, text = inputs
    return lambda: call(latents, timestep, text, return_dict=False)[0]


def our_forward(
    folder: str, inputs: tuple[torch.Tensor, ...], attention: dict[str, Any], *, compiled: bool
) -> Forward:
    """Our model with an attention section."""
    lengths = {"self": (TOKENS, TOKENS), "cross": (TOKENS, TEXT_TOKENS)}
    with use_attention_config(attention, device="cuda", dtype=torch.bfloat16, lengths=lengths):
        model = WanModel.from_pretrained(folder, device="cuda", dtype=torch.bfloat16).eval()
    print(attention_report(model))
    if compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    return lambda: model(*inputs)


def measure(forwards: dict[str, Forward], expected: torch.Tensor, *, compiled: bool) -> list[Row]:
    """Alternating rounds of all candidates, after two calls each."""
    differences = {}
    for name, forward in forwards.items():
        start = time.perf_counter()
        output = forward().float()
        differences[name] = ((output - expected).norm() / expected.norm()).item()
        if compiled:
            print(f"{name}: first compiled call took {time.perf_counter() - start:.0f} s")
        forward()
    times: dict[str, list[float]] = {name: [] for name in forwards}
    for _ in range(ROUNDS):
        for name, forward in forwards.items():
            times[name].append(event_milliseconds(forward))
    return [
        Row(name, compiled, statistics.median(values), differences[name]) for name, values in times.items()
    ]


def print_ratio(rows: list[Row]) -> None:
    """A table of candidates, each against the fastest of diffusers."""
    if not rows:
        return
    best = min(row.milliseconds for row in rows if row.name.startswith("diffusers"))
    print("compiled" if rows[0].compiled else "eager", f"(target for the platform default: {TARGET})")
    for row in rows:
        print(
            f"  {row.name:32} {row.milliseconds:8.1f} ms, {row.milliseconds / best:.3f} of diffusers' best, "
            f"relative difference {row.difference:.1e}"
        )


def event_milliseconds(call: Callable[[], object]) -> float:
    """Device time of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


if __name__ == "__main__":
    main()
