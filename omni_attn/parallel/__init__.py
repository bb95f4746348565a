"""One sequence over several processes: Ulysses, ring, both, and gathered keys and values."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omni_attn.config.parallel import ParallelConfig
    from omni_attn.parallel.connection import connect, connected, disconnect
    from omni_attn.parallel.context import Parallel, current_parallel, use_parallel
    from omni_attn.parallel.failure import fail_together
    from omni_attn.parallel.shards import Shards

_HOME = {
    "Parallel": "omni_attn.parallel.context",
    "ParallelConfig": "omni_attn.config.parallel",
    "Shards": "omni_attn.parallel.shards",
    "connect": "omni_attn.parallel.connection",
    "connected": "omni_attn.parallel.connection",
    "current_parallel": "omni_attn.parallel.context",
    "disconnect": "omni_attn.parallel.connection",
    "fail_together": "omni_attn.parallel.failure",
    "use_parallel": "omni_attn.parallel.context",
}

__all__ = [
    "Parallel",
    "ParallelConfig",
    "Shards",
    "connect",
    "connected",
    "current_parallel",
    "disconnect",
    "fail_together",
    "use_parallel",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(
            f"module 'omni_attn.parallel' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value
