"""The processes that tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omni_attn.config import ParallelConfig
from tests.parallel.processes import Processes

GPUS = 2


@pytest.fixture(scope="session")
def _gloo_processes() -> Iterator[Processes]:
    processes = Processes("cpu")
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def _nccl_processes() -> Iterator[Processes]:
    processes = Processes("cuda")
    yield processes
    processes.close()


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)])
def processes(request: pytest.FixtureRequest) -> Processes:
    """Ranks in processes of their own: on the CPU, and each with a GPU."""
    params = getattr(request.node, "callspec", None)
    needed = ParallelConfig.model_validate(params.params.get("config", {})).size if params else 1
    if request.param == "nccl" and (found := torch.cuda.device_count()) < max(GPUS, needed):
        pytest.skip(f"needs {max(GPUS, needed)} GPUs of one host, found {found}")
    made: Processes = request.getfixturevalue(f"_{request.param}_processes")
    return made
