"""Host time that the layer adds to the bare kernel call, beside diffusers' dispatcher, in one run.

    python -m benchmarks.dispatch_overhead [--rounds N] [--json FILE]

Tiny tensors, so that the host is what is measured. "Bare" calls the kernel by hand on the same tensors (see
bare_calls.py). Rounds of all candidates alternate; the median of the rounds counts. The targets are a third of what
diffusers adds for the same kernel, and 8 microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.bare_calls import BareKernel, Call, Tensors, bare_kernels
from benchmarks.machine import machine_line
from omni_attn import Attention, AttentionConfig, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.errors import OmniAttnError

CALLS_PER_ROUND = 300
ROUNDS = 101
SHAPE = (1, 64, 2, 128)  # B, S, H, D


@dataclass(frozen=True)
class Row:
    """Microseconds per call of one kernel; diffusers None where it has no such kernel here."""

    kernel: str
    bare_us: float
    layer_us: float
    diffusers_us: float | None

    @property
    def ratio(self) -> float | None:
        """What the layer adds over what diffusers adds."""
        return (
            None
            if self.diffusers_us is None
            else (self.layer_us - self.bare_us) / (self.diffusers_us - self.bare_us)
        )


def main() -> None:
    """Measures every backend that runs here, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="alternating rounds of each candidate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, key, value = (torch.randn(SHAPE, device=device, dtype=dtype) for _ in range(3))
    tensors = (query, key, value)
    print(machine_line(device))
    rows = []
    with torch.inference_mode():
        for kernel in bare_kernels(tensors):
            try:
                rows.append(measure(kernel, tensors, arguments.rounds))
            except OmniAttnError as error:
                print(f"{kernel.backend} {kernel.variant or ''}: {error}")
    for row in rows:
        peer_text = "no such kernel in diffusers here"
        if row.diffusers_us is not None:
            added = row.diffusers_us - row.bare_us
            peer_text = f"diffusers adds {added:6.2f}, ratio {row.ratio:.2f} (target 0.33)"
        print(
            f"{row.kernel:22} bare {row.bare_us:7.2f} us, layer adds {row.layer_us - row.bare_us:6.2f}, {peer_text}"
        )
    if arguments.json:
        report = {
            "machine": machine_line(device),
            "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        }
        arguments.json.write_text(json.dumps(report, indent=1))


def diffusers_call(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Call | None:
    """diffusers' dispatcher pinned to one of its backends; None where that cannot run."""
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    backend = AttentionBackendName(name)

    def call() -> torch.Tensor:
        output: torch.Tensor = dispatch_attention_fn(query, key, value, backend=backend)
        return output

    try:
        call()
    except Exception as error:
        print(f"diffusers {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        return None
    return call


def measure(kernel: BareKernel, tensors: Tensors, rounds: int) -> Row:
    """Alternating rounds of the bare call, a prepared layer, and diffusers."""
    query = tensors[0]
    spec = {"backend": kernel.backend} | ({"variant": kernel.variant} if kernel.variant else {})
    config = AttentionConfig.model_validate({"default": spec})
    with use_attention_config(config, device=query.device, dtype=query.dtype):
        layer = Attention(SHAPE[2], SHAPE[3], role="self", mask_usage="never")
    record = AttentionMetadata()
    prepare_attention(layer, {"self": record}, {"self": (SHAPE[1], SHAPE[1])})
    calls: dict[str, Call] = {"bare": kernel.call, "layer": lambda: layer(*tensors, record)}
    peer = None if kernel.diffusers is None else diffusers_call(kernel.diffusers, *tensors)
    if peer is not None:
        calls["diffusers"] = peer
    torch.testing.assert_close(calls["layer"](), kernel.call(), rtol=2e-2, atol=2e-2)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(host_microseconds(call))
    median = {name: statistics.median(values) for name, values in times.items()}
    label = f"{kernel.backend} {kernel.variant or ''}".strip()
    return Row(label, median["bare"], median["layer"], median.get("diffusers"))


def host_microseconds(call: Callable[[], object], calls: int = CALLS_PER_ROUND) -> float:
    """Mean host time of so many calls; the device's queue is empty before, and drained after, outside the clock."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return elapsed / calls * 1e6


if __name__ == "__main__":
    main()
