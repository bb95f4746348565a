"""The processes that tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omni_attn.config import ParallelConfig
from tests.parallel.processes import Processes

GPUS = 2


@pytest.fixture(scope="session")
def gloo_processes() -> Iterator[Processes]:
    processes = Processes("cpu")
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def nccl_processes() -> Iterator[Processes]:
    processes = Processes("cuda", {"symmetric_memory": False})
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def memory_processes() -> Iterator[Processes]:
    processes = Processes("cuda", {"symmetric_memory": True})
    yield processes
    processes.close()


WAYS = ["gloo", *(pytest.param(way, marks=pytest.mark.multi_gpu) for way in ("nccl", "memory"))]


@pytest.fixture(params=WAYS)
def processes(request: pytest.FixtureRequest) -> Processes:
    """Ranks in processes of their own: on the CPU, and each with a GPU, exchanging by NCCL and through memory."""
    params = getattr(request.node, "callspec", None)
    needed = ParallelConfig.model_validate(params.params.get("config", {})).size if params else 1
    if request.param != "gloo" and (found := torch.cuda.device_count()) < max(GPUS, needed):
        pytest.skip(f"needs {max(GPUS, needed)} GPUs of one host, found {found}")
    made: Processes = request.getfixturevalue(f"{request.param}_processes")
    return made
