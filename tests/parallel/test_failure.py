"""A rank that fails makes all ranks fail, with its message, and none waits for ever."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from omni_attn.parallel.watch import Watch
from tests.parallel import work
from tests.parallel.processes import Processes, Work

TWO = {"ulysses_degree": 2}
THREE = {"ring_degree": 3}


@pytest.mark.parametrize("config", [TWO, THREE], ids=str)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fail", [work.fail_before, work.fail_between])
def test_its_message_is_everybodys(
    processes: Processes, config: dict[str, Any], rank: int, fail: Work
) -> None:
    outcomes = processes.outcomes(config, fail, rank)
    assert outcomes[rank].error == ("ValueError", f"rank {rank} has had enough")
    told = f"Process {rank} of the {len(outcomes)} that share the sequence failed, and all stop with it: "
    others = [outcome.error for other, outcome in enumerate(outcomes) if other != rank]
    assert others == [("ParallelError", f"{told}ValueError: rank {rank} has had enough")] * len(others)
    assert [outcome.exit_code for outcome in outcomes] == [1] * len(outcomes)


def test_the_others_wait_in_a_layer(processes: Processes) -> None:
    """Who waits on its GPU, for memory of a rank that is gone, cannot be freed and is ended."""
    failed, waits = processes.outcomes(TWO, work.fail_before_attention, 0)
    assert failed.error == ("ValueError", "rank 0 has had enough")
    assert waits.error is not None and waits.error[0] in ("ParallelError", "ended")
    assert (failed.exit_code, waits.exit_code) == (1, 1)


def test_an_error_in_the_exchange_itself(processes: Processes) -> None:
    first, second = (outcome.error for outcome in processes.outcomes(TWO, work.fail_inside, 0))
    assert first is not None and second is not None
    assert second[0] == "ParallelError" and first[1] in second[1]


def test_a_failure_when_the_others_are_through(processes: Processes) -> None:
    failed, other = processes.outcomes(TWO, work.fail_late, 0)
    assert failed.error == ("ConfigError", "rank 0 has no room for its output: free some")
    assert other.error is not None and other.error[0] == "ParallelError"
    assert other.error[1].endswith("all stop with it: rank 0 has no room for its output: free some")
    assert (failed.exit_code, other.exit_code) == (2, 2), "a mistake of a person's, on every rank"


def test_an_error_that_all_meet_is_each_ones_own(processes: Processes) -> None:
    for outcome in processes.outcomes(TWO, work.fail_alike):
        assert outcome.error == ("ConfigError", "all ranks read the same wrong file: correct it")
        assert outcome.exit_code == 2


def test_a_rank_that_ends_without_a_word(processes: Processes) -> None:
    stays, leaves = processes.outcomes({**TWO, "timeout_seconds": 20}, work.leave, 1)
    assert leaves.exit_code == 7
    assert stays.error is not None and stays.error[0] != "stuck" and stays.exit_code != 0


def test_a_rank_that_is_busy_with_something_else_is_ended(processes: Processes) -> None:
    started = time.monotonic()
    failed, busy = processes.outcomes(TWO, work.stay_busy, 0)
    assert failed.error == ("ConfigError", "rank 0 has had enough")
    assert busy.error == ("ended", "without a word") and busy.exit_code == 2
    assert time.monotonic() - started < 30


def test_a_rank_that_never_comes(processes: Processes) -> None:
    waits, _ = processes.outcomes({**TWO, "timeout_seconds": 1}, work.hang, 1, patience=75)
    assert waits.error is not None and waits.error[0] != "stuck"


def test_who_waits_for_the_others_waits_while_they_live(processes: Processes) -> None:
    assert processes.run({**TWO, "timeout_seconds": 1}, work.come_through_slowly) == ["through"] * 2


def test_no_thread_is_left_that_asks_the_store_as_python_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_attn.parallel.watch.LOOK_EVERY", 0.0)
    monkeypatch.setattr(Watch, "_look", lambda self: time.sleep(0.3))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        watch = Watch(group, patience=1)
        watch.start()
        time.sleep(0.05)
        watch.stop()
        assert not watch.is_alive()
    finally:
        dist.destroy_process_group()
