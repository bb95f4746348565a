"""Memory that GPUs share: of two of them, and of one that two processes have together, which one GPU can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.parallel import work
from tests.parallel.processes import Processes
from tests.parallel.scene import Call
from tests.parallel.test_processes import JOINT, MASKS, SHAPES, check

Run = Callable[..., list[Any]]
every_config = pytest.mark.parametrize(
    "degrees", [{"ulysses_degree": 2}, {"ulysses_degree": 2, "head_pieces": 3}, {"ring_degree": 2}], ids=str
)


@pytest.fixture(
    params=[
        pytest.param("one", marks=pytest.mark.gpu),
        pytest.param("several", marks=pytest.mark.multi_gpu),
    ]
)
def run(request: pytest.FixtureRequest) -> Run:
    """What each of two ranks gives that exchange through memory: run(degrees, work, *arguments)."""
    needed, found = (1 if request.param == "one" else 2), torch.cuda.device_count()
    if found < needed:
        pytest.skip(f"needs {needed} GPUs of one host, found {found}")
    if request.param == "several":
        shared: Processes = request.getfixturevalue("memory_processes")
        return shared.run
    together: Processes = request.getfixturevalue("gloo_processes")
    return lambda degrees, done, *arguments: together.run(degrees, work.on_one_gpu, done, *arguments)


@every_config
def test_one_rank(run: Run, degrees: dict[str, int]) -> None:
    calls = {**SHAPES, **MASKS, **JOINT}
    for (name, call), outputs in zip(
        calls.items(), zip(*run(degrees, work.attend, list(calls.values())), strict=True), strict=True
    ):
        check(call, list(outputs), name)


@every_config
def test_replayed(run: Run, degrees: dict[str, int]) -> None:
    call = Call(12, heads=6)
    for turn, outputs in enumerate(zip(*run(degrees, work.replay), strict=True)):
        check(_smaller(call, turn), list(outputs), f"replay {turn}")


@pytest.mark.parametrize("pieces", [1, 4])
def test_memory_that_is_used_again_and_again(run: Run, pieces: int) -> None:
    found = run({"ulysses_degree": 2, "head_pieces": pieces}, work.attend_again_and_again)
    for turn, outputs in enumerate(zip(*found, strict=True)):
        rounds, number = divmod(turn, len(work.AGAIN_AND_AGAIN))
        check(_smaller(work.AGAIN_AND_AGAIN[number], rounds), list(outputs), f"turn {turn}")


def _smaller(call: Call, times: int) -> Call:
    """The same call with its inputs halved so many times."""
    found = Call(call.length, heads=call.heads, batch=call.batch)
    found.own = [tensor * 0.5**times for tensor in call.own]
    return found


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs of one host")
@pytest.mark.parametrize("degrees", [{"ulysses_degree": 2}, {"ring_degree": 2}], ids=str)
def test_memory_where_it_is_there(memory_processes: Processes, degrees: dict[str, Any]) -> None:
    """Two GPUs of one host: without a word said, exchanges go through memory."""
    for asked, told in (
        (None, "through one another's memory"),
        (True, "through one another's memory"),
        (False, ""),
    ):
        assert memory_processes.run({**degrees, "symmetric_memory": asked}, work.way) == [told] * 2
