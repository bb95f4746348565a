"""A command that several processes run: which of them speaks, what is told once, and what they share.

torchrun tells each its number and how many there are in the variables RANK and WORLD_SIZE.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from omni_attn.errors import ConfigError

if TYPE_CHECKING:
    from omni_attn.config import PipelineConfig


def number_of_processes() -> int:
    """Processes that were started together; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def is_first() -> bool:
    """Whether this is the process that prints and writes."""
    return number_of_processes() == 1 or int(os.environ.get("RANK") or 0) == 0


def refuse_several(command: str) -> None:
    """Nothing if this process alone runs the command, one that a single process answers.

    Raises:
        ConfigError: torchrun started others beside it.
    """
    started = number_of_processes()
    if started > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            f"omni-attn {command}: torchrun started {started} processes, and one answers. Start it without torchrun."
        )


def refuse_parallel(config: PipelineConfig, command: str, advice: str) -> None:
    """Nothing if the pipeline runs in one process, as a command needs that looks at one.

    Raises:
        ConfigError: its sequence is split over several.
    """
    if config.parallel.size > 1:
        raise ConfigError(
            f"parallel: {config.parallel.describe()} splits the sequence over {config.parallel.size} processes, and "
            f"omni-attn {command} looks at one. {advice}"
        )


@contextmanager
def ranks_of(config: PipelineConfig) -> Iterator[None]:
    """Models that are built inside are split over the processes that the pipeline asks for.

    Raises:
        ConfigError: other processes were started than it asks for; on each of them, before they wait for one another.
        ParallelError: another process failed.
    """
    started = number_of_processes()
    if config.parallel.size == 1:
        if started > 1:
            raise ConfigError(_unasked(config, started))
        yield
        return
    from omni_attn.models.runtime import resolve_device
    from omni_attn.parallel.connection import connected
    from omni_attn.parallel.context import use_parallel

    with connected(config.parallel, resolve_device(config.device).type) as parallel, use_parallel(parallel):
        yield


def _unasked(config: PipelineConfig, started: int) -> str:
    from omni_attn.config.families import FAMILIES

    alone = "start it without torchrun"
    text = f"parallel: torchrun started {started} processes, and the pipeline runs in one. "
    if not FAMILIES[config.pipeline].splits_sequence:
        return f"{text}Models of pipeline {config.pipeline} do not split their sequence: {alone}."
    line = f"parallel: {{ulysses_degree: {started}}}"
    return f"{text}Write `{line}` into the file (or --set parallel.ulysses_degree={started}), or {alone}."


@contextmanager
def one_voice() -> Iterator[None]:
    """Warnings come from the first process alone: the others have the same ones to tell."""
    if is_first():
        yield
        return
    log = logging.getLogger("omni_attn")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def says_first(text: str) -> bool:
    """Whether none of the processes that were started together has told this text before; the answer counts as telling.

    An error that all of them meet is then read once, and one that a single process meets is read as well.
    """
    if number_of_processes() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    import torch.distributed as dist

    round_of_starts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"omni_attn/told/{round_of_starts}/{hashlib.sha256(text.encode()).hexdigest()}"
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # left out of __all__
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=10),
        )
        return bool(store.add(key, 1) == 1)
    except (RuntimeError, KeyError, ValueError):  # torchrun itself is gone: better twice than never
        return True
