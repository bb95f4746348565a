"""Time and error of every dense backend that this machine accepts, on shapes of diffusion transformers.

    python -m benchmarks.dense [--json FILE]

Rounds of all backends alternate; the median of CUDA-event timings counts. TFLOP/s = 4 B Sq Sk H D / time. The error is
the relative Frobenius error of 64 sampled query rows against float64. The last column of a shape's row says how the
platform default compares with the fastest: the default orders in omni_attn/platforms/cuda.py rest on this script.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.machine import machine_line
from omni_attn import Attention, AttentionConfig, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.backends.registry import load_backend, registered_names
from omni_attn.errors import OmniAttnError
from omni_attn.ops.reference import reference_attention
from omni_attn.platforms import current_omni_platform

SHAPES = {  # B, Sq, Sk, H, D
    "flux 1024": (1, 4608, 4608, 24, 128),
    "sd3-like": (2, 4250, 4250, 24, 64),
    "wan 1.3b 480p self": (1, 32760, 32760, 12, 128),
    "wan 14b 480p cross": (1, 32760, 512, 40, 128),
    "wan 14b 720p self": (1, 75600, 75600, 40, 128),
}
ROUNDS = 7
SAMPLED_ROWS = 64


@dataclass(frozen=True)
class Row:
    """One backend on one shape."""

    shape: str
    backend: str
    milliseconds: float
    tflops: float
    error: float
    is_default: bool


def main() -> None:
    """Measures, prints a table, and the ratio of the default to the best."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs an NVIDIA GPU, found none: these shapes are timed with CUDA events")
    print(machine_line("cuda"))
    rows = []
    with torch.inference_mode():
        for name in SHAPES:
            rows += measure(name)
            shape_rows = [row for row in rows if row.shape == name]
            best = min(row.milliseconds for row in shape_rows)
            for row in shape_rows:
                mark = f"default, {best / row.milliseconds:.3f} of the best" if row.is_default else ""
                print(
                    f"{row.shape:20} {row.backend:18} {row.milliseconds:9.3f} ms {row.tflops:7.1f} TFLOP/s "
                    f"error {row.error:.2e} {mark}"
                )
    if arguments.json:
        report = {"machine": machine_line("cuda"), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=1))


def measure(name: str) -> list[Row]:
    """All accepted backends and variants on one shape."""
    batch, queries, keys, heads, size = SHAPES[name]
    query = torch.randn(batch, queries, heads, size, device="cuda", dtype=torch.bfloat16)
    key, value = (
        torch.randn(batch, keys, heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    sample = torch.randint(queries, (SAMPLED_ROWS,), device="cuda")
    expected = sampled_reference(query, key, value, sample)
    calls = {label: layer_call(layer, query, key, value) for label, layer in layers(name).items()}
    default = layer_for({}, name)
    times: dict[str, list[float]] = {label: [] for label in calls}
    errors = {}
    for label, call in calls.items():
        output = call()[:, sample].double()
        errors[label] = ((output - expected).norm() / expected.norm()).item()
        call()
    for _ in range(ROUNDS):
        for label, call in calls.items():
            times[label].append(event_milliseconds(call))
    assert default.selection is not None
    work = 4 * batch * queries * keys * heads * size
    rows = []
    for label, values in times.items():
        median = statistics.median(values)
        rows.append(
            Row(name, label, median, work / median / 1e9, errors[label], label == default.selection.label)
        )
    return rows


def layers(name: str) -> dict[str, Attention]:
    """A layer for each backend and variant that accepts the shape here."""
    platform = current_omni_platform("cuda")
    found = {}
    for backend in registered_names():
        facts = load_backend(platform.class_path(backend), backend).facts
        variants: list[str | None] = [v.name for v in facts.variants]
        for variant in variants or [None]:
            spec = {"backend": backend} | ({"variant": variant} if variant else {})
            try:
                layer = layer_for({"default": spec}, name)
            except OmniAttnError as error:
                print(f"{name:20} {backend} {variant or ''}: {str(error).splitlines()[0][:150]}")
                continue
            assert layer.selection is not None
            found[layer.selection.label] = layer
    return found


def layer_for(config: dict[str, object], name: str) -> Attention:
    """A layer of a shape's geometry under a config."""
    _, queries, keys, heads, size = SHAPES[name]
    lengths = {"self": (queries, keys)}
    parsed = AttentionConfig.model_validate(config)
    with use_attention_config(parsed, device="cuda", dtype=torch.bfloat16, lengths=lengths):
        return Attention(heads, size, role="self", mask_usage="never")


def layer_call(
    layer: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A prepared call of a layer."""
    record = AttentionMetadata()
    prepare_attention(layer, {"self": record}, {"self": (query.shape[1], key.shape[1])})
    return lambda: layer(query, key, value, record)


def sampled_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sample: torch.Tensor
) -> torch.Tensor:
    """float64 attention of some query rows, head by head to bound memory."""
    heads = [
        reference_attention(query[:, sample, h : h + 1], key[:, :, h : h + 1], value[:, :, h : h + 1])[0]
        for h in range(query.shape[2])
    ]
    return torch.cat(heads, dim=2)


def event_milliseconds(call: Callable[[], torch.Tensor]) -> float:
    """Device time of one call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


if __name__ == "__main__":
    main()
