"""From processes that were started together to a `Parallel`: process groups, checked before anybody waits."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from omni_attn.config.parallel import ParallelConfig
from omni_attn.errors import ConfigError
from omni_attn.parallel.collectives import Collectives, LoneCollectives
from omni_attn.parallel.context import Parallel
from omni_attn.parallel.failure import fail_together
from omni_attn.parallel.peers import PeerCollectives
from omni_attn.parallel.process_group import GroupCollectives
from omni_attn.parallel.sharing import why_not
from omni_attn.parallel.symmetric import SymmetricMemory

# What torch reads by itself when it connects processes.
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_COMMANDS = ("omni-attn", "__main__.py")

_started_here = False
_connections = 0


def connect(config: ParallelConfig, device: torch.device | str | None = None) -> Parallel:
    """This process's place among those that torchrun started, or that torch.distributed connects already.

    NCCL serves GPUs, gloo the CPU. With a GPU, the process's own one is made current.

    Args:
        config: how many processes there are to be, and what each does.
        device: kind of device that the tensors live on; "cuda" is this process's own GPU. None = CUDA where it is.

    Raises:
        ConfigError: there are more or fewer processes than the configuration has places for, or than GPUs; on every
            process alike, before one waits for another. Or GPUs cannot read one another's memory as was asked.
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _check_size(config)
    if config.size == 1:
        return Parallel(config, LoneCollectives(), LoneCollectives(), LoneCollectives())
    own = local_device(kind)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    timeout = timedelta(seconds=config.timeout_seconds)
    if not dist.is_initialized():
        _init_process_group(own, timeout)
    everyone = dist.group.WORLD
    assert everyone is not None
    _set_pg_timeout(timeout, everyone)
    try:
        groups = _groups(config, own, timeout)
    except ConfigError:
        disconnect()
        raise
    return Parallel(config, GroupCollectives(everyone), groups["ulysses"], groups["ring"])


def disconnect() -> None:
    """Gives back what `connect` started; a default process group that was there before it stays."""
    global _started_here
    if _started_here and dist.is_initialized():
        dist.destroy_process_group()
    _started_here = False


@contextmanager
def connected(config: ParallelConfig, device: torch.device | str | None = None) -> Iterator[Parallel]:
    """connect, and disconnect at the end; what one process raises inside, all raise: see fail_together.

    Raises:
        ConfigError: see connect.
        ParallelError: another process failed.
    """
    parallel = connect(config, device)
    # After a failure nothing is given back in good order: others may never answer, and processes end.
    with fail_together(parallel):
        yield parallel
    disconnect()


def local_device(device: torch.device | str) -> torch.device:
    """The device of this process: of a kind that numbers its devices, the one with the process's number on its host.

    Raises:
        ConfigError: several processes are to share one numbered device, or the host has too few.
    """
    kind = torch.device(device)
    if kind.type != "cuda":
        return kind
    processes, number = (int(os.environ.get(name) or 0) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
    if not processes and dist.is_initialized():
        processes, number = dist.get_world_size(), dist.get_rank()
    if processes <= 1 and kind.index is not None:
        return kind
    if kind.index is not None:
        raise ConfigError(
            f"device: {kind} is one GPU, and {processes} processes run on this host: write cuda, which gives each its "
            "own"
        )
    found = torch.cuda.device_count()
    if processes > found:
        raise ConfigError(
            f"device: {processes} processes run on this host, each with a GPU of its own, and it has {found}: start "
            f"{found}, or use device: cpu"
        )
    return torch.device("cuda", number)


def torchrun_command(processes: int, arguments: Sequence[str] | None = None, *, per_host: int = 0) -> str:
    """The command that starts so many processes of this program.

    Args:
        processes: on all hosts.
        arguments: of the program, its own path first; None = as this process was started.
        per_host: GPUs of a host; 0 = one host has room for all.
    """
    path, *rest = sys.argv if arguments is None else arguments
    program = ["-m", "omni_attn"] if Path(path).name in _COMMANDS else [path]
    hosts, left = divmod(processes, per_host) if 0 < per_host < processes else (1, 0)
    there = [f"--nnodes={hosts}", f"--nproc-per-node={per_host}"] if hosts > 1 and not left else []
    return shlex.join(["torchrun", *(there or [f"--nproc-per-node={processes}"]), *program, *rest])


def _check_size(config: ParallelConfig) -> None:
    needed = f"parallel: {config.describe()} takes {config.size} process{'es' * (config.size > 1)}"
    command = torchrun_command(config.size, per_host=torch.cuda.device_count())
    if dist.is_initialized():
        found, told = dist.get_world_size(), "torch.distributed connects"
    else:
        found, told = int(os.environ.get("WORLD_SIZE") or 1), "torchrun started"
        missing = [name for name in _VARIABLES if name not in os.environ]
        if config.size > 1 and missing:
            raise ConfigError(
                f"{needed}, and this one was started alone ({', '.join(missing)} not set): start them with `{command}`"
            )
    if found != config.size:
        degree = f"ulysses_degree: {found}" if found > 1 else "no section parallel"
        raise ConfigError(f"{needed}, and {told} {found}: start them with `{command}`, or write {degree}")


def _init_process_group(own: torch.device, timeout: timedelta) -> None:
    global _started_here, _connections
    # Keys of its own for each connection: in those of an earlier one are addresses where nobody listens any more.
    _connections += 1
    rank, size, *_ = variables = [os.environ[name] for name in _VARIABLES]
    try:
        store = dist.PrefixStore(f"omni_attn/{_connections}", _store_of(*variables, timeout))  # type: ignore[attr-defined]
    except dist.DistError as error:
        raise ConfigError(
            f"parallel: process {rank} of {size} did not find the others within {timeout.total_seconds():g} s: start "
            f"all of them, or raise parallel.timeout_seconds ({str(error).splitlines()[0]})"
        ) from error
    dist.init_process_group(
        dist.get_default_backend_for_device(own.type),
        store=store,
        rank=int(rank),
        world_size=int(size),
        timeout=timeout,
        device_id=own if own.type == "cuda" else None,
    )
    _started_here = True


@functools.cache
def _store_of(rank: str, size: str, address: str, port: str, timeout: timedelta) -> Any:
    """Where the processes that torch's variables describe find one another; it stays for as long as they do."""
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


def _groups(config: ParallelConfig, own: torch.device, timeout: timedelta) -> dict[str, Collectives]:
    """The group of this rank in each dimension; rank = ring place * ulysses_degree + Ulysses place."""
    degrees = {"ring": config.ring_degree, "ulysses": config.ulysses_degree}
    groups: dict[str, Collectives] = {name: LoneCollectives() for name in degrees}
    split = {name: degree for name, degree in degrees.items() if degree > 1}
    if not split:
        return groups
    mesh = init_device_mesh(own.type, tuple(split.values()), mesh_dim_names=tuple(split))
    for name in split:
        group = mesh.get_group(name)
        _set_pg_timeout(timeout, group)
        groups[name] = _collectives(group, name, config, own)
    return groups


def _collectives(
    group: dist.ProcessGroup, name: str, config: ParallelConfig, own: torch.device
) -> Collectives:
    """The ranks of one dimension, with the way that their exchanges take."""
    asked = config.symmetric_memory
    if asked is False or (asked is None and own.type != "cuda"):
        return GroupCollectives(group)
    reason = why_not(group, own)
    if asked and reason:
        raise ConfigError(
            f"parallel.symmetric_memory: ranks of {name}_degree cannot read one another's memory: {reason}. Leave it "
            "out, or set it to false: their exchanges then go through torch.distributed's collectives"
        )
    if not reason:
        return PeerCollectives(GroupCollectives(group), SymmetricMemory(group, own, config.timeout_seconds))
    return GroupCollectives(group, way=f"over {dist.get_backend(group)} ({reason})")
