"""One rank over process groups of torch's own that exchange nothing, to trace what is compiled among ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist

from omni_attn.config import ParallelConfig
from omni_attn.parallel import Parallel
from omni_attn.parallel.process_group import GroupCollectives


@contextmanager
def traced_rank(degrees: dict[str, Any]) -> Iterator[Parallel]:
    """The first rank of a configuration; what it receives holds no numbers that mean anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = ParallelConfig.model_validate(degrees)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.size)
    groups = {
        "everyone": range(config.size),
        "ulysses": range(config.ulysses_degree),
        "ring": range(0, config.ring_degree * config.ulysses_degree, config.ulysses_degree),
    }
    try:
        yield Parallel(
            config,
            **{name: GroupCollectives(dist.new_group(list(ranks))) for name, ranks in groups.items()},
        )
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
