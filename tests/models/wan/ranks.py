"""The modes of a split sequence, and models built on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omni_attn.parallel.dispatch import STRATEGIES
from omni_attn.selector import use_attention_config

MODES: dict[str, dict[str, int]] = {
    "ulysses": {"ulysses_degree": 2},
    "ring": {"ring_degree": 2},
    "ulysses_ring": {"ulysses_degree": 2, "ring_degree": 2},
    "allgather_kv": {"allgather_degree": 2},
}
DEGREES = [MODES[mode] for mode in STRATEGIES]


def on_cpu(build: Callable[[], Any], config: Any = None) -> Any:
    """What is built on a rank's own thread, where the tests' scope is not in force."""
    with use_attention_config(config, device="cpu"):
        return build()
