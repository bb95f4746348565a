"""What is wrong with the processes is told on each of them, before any waits for another."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from omni_attn.errors import ConfigError, ParallelError
from omni_attn.parallel import ParallelConfig, connect, connected
from omni_attn.parallel.connection import local_device, torchrun_command
from tests.parallel import program

ROOT = Path(__file__).parents[2]
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/omni-attn", "run", "my file.yaml"])


def _started(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(processes))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody is there: connecting would fail


def test_one_process_needs_nothing() -> None:
    with connected(ParallelConfig(), "cpu") as parallel:
        tokens = torch.arange(6.0).view(1, 3, 2)
        assert parallel.mode is None and parallel.rank == 0
        assert torch.equal(parallel.gather(parallel.split(tokens), 3), tokens)
        assert not dist.is_initialized()


@pytest.mark.parametrize("degrees", [{"ulysses_degree": 2}, {"ring_degree": 2}, {"allgather_degree": 2}])
def test_started_alone(degrees: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"takes 2 processes, and this one was started alone") as error:
        connect(ParallelConfig.model_validate(degrees), "cpu")
    assert "`torchrun --nproc-per-node=2 -m omni_attn run 'my file.yaml'`" in str(error.value)


def test_some_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    _started(monkeypatch, 2)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match=r"\(MASTER_PORT not set\)"):
        connect(ParallelConfig(ulysses_degree=2), "cpu")


@pytest.mark.parametrize(("started", "asked"), [(2, 4), (3, 2), (2, 1)])
def test_another_number_of_processes(monkeypatch: pytest.MonkeyPatch, started: int, asked: int) -> None:
    _started(monkeypatch, started)
    with pytest.raises(ConfigError, match=f"takes {asked} process.* torchrun started {started}") as error:
        connect(ParallelConfig(ulysses_degree=asked), "cpu")
    assert f"--nproc-per-node={asked} " in str(error.value) and f"ulysses_degree: {started}" in str(
        error.value
    )
    assert not dist.is_initialized()


@pytest.mark.parametrize("rank", [0, 1])
def test_others_that_never_start(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The first one waits for them, the second one for the first."""
    _started(monkeypatch, 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(
        ConfigError, match=f"process {rank} of 2 did not find the others within 1 s: start all of them"
    ):
        connect(ParallelConfig(ulysses_degree=2, timeout_seconds=1), "cpu")
    assert not dist.is_initialized()


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _started(monkeypatch, 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"4 processes run on this host.* it has 2"):
        connect(ParallelConfig(ulysses_degree=4), "cuda")


def test_each_process_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _started(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("cuda") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"cuda:0 is one GPU, and 2 processes"):
        local_device("cuda:0")
    assert local_device("cpu") == torch.device("cpu")


def test_a_numbered_gpu_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("processes", "per_host", "expected"),
    [
        (2, 0, "torchrun --nproc-per-node=2 script.py -x"),
        (8, 8, "torchrun --nproc-per-node=8 script.py -x"),
        (64, 8, "torchrun --nnodes=8 --nproc-per-node=8 script.py -x"),
        (6, 4, "torchrun --nproc-per-node=6 script.py -x"),
    ],
)
def test_the_command(processes: int, per_host: int, expected: str) -> None:
    assert torchrun_command(processes, ["script.py", "-x"], per_host=per_host) == expected


def test_under_torchrun_all_tell_the_failure_of_one() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "tests/parallel/program.py", "2", "fail_late", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    text = "rank 1 has no room for its output: free some"
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert text in lines
    assert f"Process 1 of the 2 that share the sequence failed, and all stop with it: {text}" in lines


def _spawned(rank: int, port_file: str) -> None:
    port = (
        dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False).port if rank == 0 else None
    )
    store = dist.FileStore(port_file, 2)
    if port is not None:
        store.set("port", str(port + 1))
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.get("port").decode(),
    }
    program.main(2, "exchange")
    with pytest.raises(ConfigError if rank else ParallelError, match="rank 1 has no room") as error:
        program.main(2, "fail_late", 1)
    raise error.value


def test_spawned_processes_connect_twice_and_fail_with_the_text_of_one(tmp_path: Path) -> None:
    with pytest.raises(mp.ProcessRaisedException, match="rank 1 has no room"):
        mp.spawn(_spawned, (str(tmp_path / "port"),), nprocs=2)
