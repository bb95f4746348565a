"""The thread of a process that tells the others of its failure, and learns of theirs, through the store they share."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from omni_attn.errors import OmniAttnError, ParallelError

LOOK_EVERY = 0.2
"""Seconds between two looks at the store."""
TOLD_WITHIN = 5.0
"""Seconds that a process which fails gives the others to learn of it, before it ends and is no longer heard."""
FREED_WITHIN = 15.0
"""Seconds after which a process that learnt of a failure, and is still busy, is ended from this thread."""

_FIRST = "first"


@dataclass(frozen=True)
class Failure:
    """What a process tells the others when it fails."""

    rank: int
    kind: str
    text: str
    exit_code: int

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """What an error says; the texts of our own need no name before them."""
        name, text = type(error).__name__, str(error)
        if isinstance(error, ParallelError):
            return cls(error.rank, name, text, error.exit_code)
        if isinstance(error, OmniAttnError):
            return cls(rank, name, text, 2)
        return cls(rank, name, f"{name}: {text}" if text else name, 1)

    def elsewhere(self, size: int) -> ParallelError:
        """The error of the other processes: the same text in each."""
        return ParallelError(
            f"Process {self.rank} of the {size} that share the sequence failed, and all stop with it: {self.text}",
            rank=self.rank,
            exit_code=self.exit_code,
            first=self.text,
        )


class Watch(threading.Thread):
    """One process's watch over a stretch of work that all processes of a group do together.

    Args:
        group: the default process group.
        patience: seconds without a sign of life after which a process counts as gone.
    """

    def __init__(self, group: dist.ProcessGroup, patience: float) -> None:
        super().__init__(name="omni_attn watch", daemon=True)
        self.rank, self.size, self.patience = group.rank(), group.size(), patience
        self._aborts = dist.get_backend(group) == "nccl"
        # A connection of its own: calls on one wait for one another.
        store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=max(TOLD_WITHIN, min(patience, 60))))
        # Each stretch of work has keys of its own, also in a store that outlives the group: torchrun's does. Who begins
        # is counted there, and nobody begins the next stretch before all have come to the end of this one.
        begun = distributed_c10d.PrefixStore("omni_attn", store).add("begun", 1)
        self._store = distributed_c10d.PrefixStore(f"omni_attn/{(begun - 1) // self.size}", store)
        self._over = threading.Event()
        self._failure: Failure | None = None

    def run(self) -> None:
        """Looks for a failure of another process until this one is through."""
        while not self._over.wait(LOOK_EVERY):
            failure = self._look()
            if failure is None or failure.rank == self.rank:
                continue
            self._failure = failure
            self._free()
            if not self._over.wait(FREED_WITHIN):
                sys.stderr.write(f"{failure.elsewhere(self.size)}\n")
                sys.stderr.flush()
                os._exit(failure.exit_code)
            return

    def stop(self) -> None:
        """Ends the watch, and waits for its thread: one that still asks the store as Python ends aborts the process."""
        self._over.set()
        self.join(TOLD_WITHIN)

    def report(self, error: BaseException) -> Failure | None:
        """Tells the others of an error; gives the failure that came before it, None where they are the same."""
        own = Failure.of(error, self.rank)
        try:
            first = _read(self._store.compare_set(_FIRST, "", json.dumps(asdict(own))))
            self._store.set(f"knows/{self.rank}", "")
            self._wait_for("knows", TOLD_WITHIN)
        except RuntimeError:  # the store went with the process that held it
            first = self._failure or own
        self._free()
        return None if first.rank == self.rank or (first.kind, first.text) == (own.kind, own.text) else first

    def wait_for_all(self) -> None:
        """Waits until every process is through.

        Raises:
            ParallelError: one failed, or shows no sign of life.
        """
        beats: dict[int, tuple[int, float]] = {}

        def check(missing: list[int]) -> None:
            if self._failure is not None:
                raise self._failure.elsewhere(self.size)
            now = time.monotonic()
            for rank in missing:
                beat, since = self._store.add(f"beat/{rank}", 0), now
                if rank in beats and beats[rank][0] == beat:
                    since = beats[rank][1]
                beats[rank] = (beat, since)
                if now - since > self.patience:
                    raise self._silent(rank)

        try:
            self._store.set(f"through/{self.rank}", "")
            self._wait_for("through", None, check)
            # The store is in one of the processes, or in torchrun: it stays until nobody looks any more.
            self._store.set(f"leaves/{self.rank}", "")
            if self.rank == 0:
                self._wait_for("leaves", TOLD_WITHIN)
        except ParallelError:
            raise
        except RuntimeError as error:
            raise self._gone().elsewhere(self.size) from error

    def _look(self) -> Failure | None:
        try:
            self._store.add(f"beat/{self.rank}", 1)
            if not self._store.check([_FIRST]):
                return None
            self._store.set(f"knows/{self.rank}", "")
            return _read(self._store.get(_FIRST))
        except RuntimeError:
            return None if self._over.is_set() else self._gone()

    def _wait_for(
        self, said: str, seconds: float | None, check: Callable[[list[int]], None] = lambda missing: None
    ) -> None:
        """Until every process has said something, or so many seconds are over."""
        end = None if seconds is None else time.monotonic() + seconds
        while missing := [rank for rank in range(self.size) if not self._store.check([f"{said}/{rank}"])]:
            check(missing)
            if end is not None and time.monotonic() > end:
                return
            time.sleep(LOOK_EVERY / 10)

    def _free(self) -> None:
        """Ends exchanges that this process waits in, where that can be done from outside of them."""
        if not self._aborts:
            return
        self._aborts = False
        abort = threading.Thread(target=distributed_c10d._abort_process_group, daemon=True)
        abort.start()
        abort.join(TOLD_WITHIN)

    def _silent(self, rank: int) -> ParallelError:
        error = ParallelError(
            f"Process {rank} of the {self.size} that share the sequence gave no sign of life for {self.patience:g} s, "
            "while others were through and waited for it. If it is only slow, raise parallel.timeout_seconds",
            rank=rank,
        )
        self.report(error)
        return error

    def _gone(self) -> Failure:
        return Failure(0, "lost", "it holds what connects the others, and cannot be reached any more", 1)


def _read(told: bytes) -> Failure:
    return Failure(**json.loads(told))
