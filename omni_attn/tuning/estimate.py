"""What a measurement would cost, asked before it starts."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from omni_attn.errors import ConfigError
from omni_attn.models.runtime import check_memory
from omni_attn.tuning.cases import Case
from omni_attn.tuning.clocks import WallClock

LIMIT_SECONDS = 300.0
# The trial on a CPU: B, H, S, D of one call, some milliseconds.
_TRIAL = (1, 4, 512, 64)
# Query, key, value and output, the reference's head and a kernel's own copies.
_MEMORY_FACTOR = 3
_SPARE_BYTES = 2**30


def check_cost(case: Case, device: torch.device, calls: int) -> None:
    """Nothing if a case can be measured here with this many calls.

    Raises:
        ConfigError: it does not fit the GPU's memory, or takes a CPU longer than LIMIT_SECONDS; with both numbers.
    """
    if device.type == "cuda":
        check_memory(
            _MEMORY_FACTOR * case.tensor_bytes + _SPARE_BYTES,
            device,
            what=f"Measuring {case.name} ({case})",
            advice="Choose a smaller shape, or a device with more memory.",
        )
        return
    if device.type != "cpu":
        return
    rate = operations_per_second(case.dtype)
    seconds = case.operations * calls / rate
    if seconds > LIMIT_SECONDS:
        raise ConfigError(
            f"{case.name}: {case} on a CPU: about {_spoken(seconds)} for {calls} calls of "
            f"{case.operations / 1e12:.3g} TFLOP each at the {rate / 1e12:.2g} TFLOP/s tried out here; more than "
            f"{_spoken(LIMIT_SECONDS)} is not started. Choose a smaller shape, fewer rounds, or a GPU."
        )


def operations_per_second(dtype: torch.dtype) -> float:
    """What torch's attention reaches on this CPU, from one small trial."""
    batch, heads, tokens, size = _TRIAL
    query = torch.randn(_TRIAL, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.inference_mode():
        F.scaled_dot_product_attention(query, query, query)
        clock = WallClock(query.device)
        times = [
            clock.milliseconds(lambda: F.scaled_dot_product_attention(query, query, query)) for _ in range(3)
        ]
    return 4 * batch * heads * tokens**2 * size / min(times) * 1e3


def _spoken(seconds: float) -> str:
    """A duration as people say it."""
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"
