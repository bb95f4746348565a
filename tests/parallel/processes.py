"""Processes for tests of what is split over ranks: kept for all tests, and connected anew for each piece of work."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from omni_attn.config import ParallelConfig
from omni_attn.parallel import Parallel, connected, use_parallel
from omni_attn.parallel.peers import PeerCollectives
from omni_attn.parallel.symmetric import SymmetricMemory
from omni_attn.parallel.watch import Failure

Work = Callable[..., Any]
PATIENCE = 90.0
"""Seconds after which a process that does not answer counts as stuck."""


@dataclass(frozen=True)
class Outcome:
    """What a rank's work came to: its result, or its error and the code that the process ended with.

    Attributes:
        error: the error's type name and text, and "stuck" for a process that did not answer.
    """

    result: Any = None
    error: tuple[str, str] | None = None
    exit_code: int | None = None


class Processes:
    """As many processes as the largest piece of work took, on one kind of device.

    Args:
        device: "cpu", with gloo between them, or "cuda", with NCCL and a GPU for each.
        settings: of ParallelConfig, where a piece of work does not say them.
    """

    def __init__(self, device: str, settings: dict[str, Any] | None = None) -> None:
        self.device, self.settings = device, settings or {}
        self._context = multiprocessing.get_context("forkserver")
        # One process imports what they need, and they are its forks.
        self._context.set_forkserver_preload(["torch._dynamo", "tests.parallel.work"])
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._folder = TemporaryDirectory(prefix="omni_attn_ranks_")
        self._given = 0

    def run(self, config: dict[str, Any], work: Work, *arguments: Any) -> list[Any]:
        """What `work(parallel, *arguments)` gives on each rank, tensors on the CPU.

        Raises:
            AssertionError: a rank failed; the text holds every rank's error.
        """
        outcomes = self.outcomes(config, work, *arguments)
        errors = [f"rank {rank}: {o.error}" for rank, o in enumerate(outcomes) if o.error is not None]
        assert not errors, "\n".join(errors)
        return [outcome.result for outcome in outcomes]

    def outcomes(
        self, config: dict[str, Any], work: Work, *arguments: Any, patience: float = PATIENCE
    ) -> list[Outcome]:
        """What became of `work(parallel, *arguments)` on each rank; processes that failed are replaced by new ones.

        Args:
            patience: seconds for all of them.
        """
        config = {**self._settings_of(config), **config}
        size = ParallelConfig.model_validate(config).size
        if self.device == "cuda" and len(self._workers) < size:
            self.stop()  # torch counts what a process shares with others, and new ones would begin at none
        while len(self._workers) < size:
            self._workers.append(self._start())
        self._given += 1
        file = Path(self._folder.name, str(self._given))
        for rank, (_, line) in enumerate(self._workers[:size]):
            line.send_bytes(pickle.dumps((file, rank, config, work, arguments)))
        end = time.monotonic() + patience
        outcomes = [_outcome(*worker, max(1.0, end - time.monotonic())) for worker in self._workers[:size]]
        if any(outcome.error is not None for outcome in outcomes):
            self.stop()
        return outcomes

    def _settings_of(self, config: dict[str, Any]) -> dict[str, Any]:
        """Gathered keys have no choice of ways."""
        return {} if "allgather_degree" in config else self.settings

    def stop(self) -> None:
        """Ends all processes."""
        for process, line in self._workers:
            line.close()
            if process.is_alive():
                process.kill()
            process.join()
        self._workers = []

    def close(self) -> None:
        """Ends all processes, for good."""
        self.stop()
        self._folder.cleanup()

    def _start(self) -> tuple[BaseProcess, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self.device), daemon=True)
        process.start()
        there.close()
        return process, here


def _outcome(process: BaseProcess, line: Connection, patience: float) -> Outcome:
    try:
        if not line.poll(patience):
            return Outcome(error=("stuck", f"no answer within {patience} s"))
        told = Outcome(*pickle.loads(line.recv_bytes()))
    except EOFError:
        told = Outcome(error=("ended", "without a word"))
    if told.error is not None:
        process.join(patience)
        return Outcome(error=told.error, exit_code=process.exitcode)
    return told


def _serve(line: Connection, device: str) -> None:
    torch.set_num_threads(1)
    # What NCCL's watchdog ends after its timeout it ends at once, without a minute for what it saw to be written down.
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
    while True:
        try:
            given = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        try:
            result = _work(device, *given)
        except BaseException as error:
            line.send_bytes(pickle.dumps((None, (type(error).__name__, str(error)))))
            # As a program that lets the error through would: what the others wait for closes with the process.
            os._exit(Failure.of(error, 0).exit_code)
        line.send_bytes(pickle.dumps((result,)))


def _work(
    device: str, file: Path, rank: int, config: dict[str, Any], work: Work, arguments: Sequence[Any]
) -> Any:
    made = ParallelConfig.model_validate({"timeout_seconds": 60, **config})
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(made.size)}
    backend = dist.get_default_backend_for_device(device)
    own = torch.device(device, rank) if device == "cuda" else None
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=made.size, device_id=own
    )
    with connected(made, device) as parallel, use_parallel(parallel):
        result = work(parallel, *arguments)
    dist.destroy_process_group()
    return _on_cpu(result)


def _on_cpu(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.detach().cpu()
    if isinstance(result, list | tuple):
        return type(result)(_on_cpu(item) for item in result)
    return result


def device_of(parallel: Parallel) -> torch.device:
    """Where a rank's tensors live: on the GPU whose memory it shares, on its own with NCCL, or on the CPU."""
    for group in (parallel.ulysses, parallel.ring):
        if isinstance(group, PeerCollectives) and isinstance(group.memory, SymmetricMemory):
            return group.memory.device
    return torch.device("cuda", parallel.rank) if dist.get_backend() == "nccl" else torch.device("cpu")
