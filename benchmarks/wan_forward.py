"""A whole forward of a Wan preset, ours beside diffusers' model with the same weights, in one run.

    python -m benchmarks.wan_forward [--preset wan2.1-t2v-1.3b] [--json FILE]

Seeded weights, 480 x 832, 81 frames, bfloat16, eager, batch 1. Rounds alternate; the median of CUDA-event timings counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch

from benchmarks.dense import event_milliseconds
from benchmarks.machine import machine_line
from omni_attn import attention_report, use_attention_config
from omni_attn.models.wan.config import WAN_PRESETS
from omni_attn.models.wan.model import WanModel

ROUNDS = 7
FRAMES, HEIGHT, WIDTH = 21, 60, 104  # latents of 81 frames of 480 x 832
TEXT_TOKENS = 512
TOKENS = FRAMES * (HEIGHT // 2) * (WIDTH // 2)


def main() -> None:
    """Builds both models, compares their outputs, and times them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="wan2.1-t2v-1.3b", choices=sorted(WAN_PRESETS))
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            "needs an NVIDIA GPU, found none: a forward of 32760 tokens is timed with CUDA events"
        )
    print(machine_line("cuda"))
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        calls = build_calls(arguments.preset, folder)
        outputs = {name: call().float() for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(event_milliseconds(call))
    peer = "diffusers, native"
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, value in median.items():
        difference = ((outputs[name] - outputs[peer]).norm() / outputs[peer].norm()).item()
        print(
            f"{name:24} {value:8.1f} ms, {value / median[peer]:.3f} of diffusers, relative difference {difference:.1e}"
        )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine_line("cuda"), "milliseconds": median}, indent=1)
        )


def build_calls(preset: str, folder: str) -> dict[str, Callable[[], torch.Tensor]]:
    """Forwards of diffusers' model and of ours with the platform default and with TORCH_SDPA, on the same input."""
    from diffusers import WanTransformer3DModel

    config = WAN_PRESETS[preset].transformer
    torch.manual_seed(0)
    with torch.device("cuda"):
        peer = WanTransformer3DModel(**{field.name: getattr(config, field.name) for field in fields(config)})
    peer.save_pretrained(folder)
    peer = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16).to("cuda").eval()
    latents = torch.randn(1, config.in_channels, FRAMES, HEIGHT, WIDTH, device="cuda", dtype=torch.bfloat16)
    text = torch.randn(1, TEXT_TOKENS, config.text_dim, device="cuda", dtype=torch.bfloat16)
    timestep = torch.tensor([500.0], device="cuda")
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "diffusers, native": lambda: peer(latents, timestep, text, return_dict=False)[0]
    }
    lengths = {"self": (TOKENS, TOKENS), "cross": (TOKENS, TEXT_TOKENS)}
    for name, attention in (("ours, platform default", {}), ("ours, TORCH_SDPA", {"default": "TORCH_SDPA"})):
        with use_attention_config(attention, device="cuda", dtype=torch.bfloat16, lengths=lengths):
            model = WanModel.from_pretrained(folder, device="cuda", dtype=torch.bfloat16).eval()
        print(attention_report(model))
        calls[name] = lambda model=model: model(latents, timestep, text)
    return calls


if __name__ == "__main__":
    main()
