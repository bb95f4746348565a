"""One process fails, all fail: its error reaches the others, and those that wait for it in an exchange are freed.

The first error is written into the store that connected the processes, where a thread of each looks for it. Who waits
in an exchange of NCCL is freed by aborting the communicators; with gloo it is freed when the process that failed ends;
who waits on its GPU for another's memory is ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from omni_attn.parallel.context import Parallel
from omni_attn.parallel.process_group import GroupCollectives
from omni_attn.parallel.watch import Watch


@contextmanager
def fail_together(parallel: Parallel) -> Iterator[None]:
    """What one of the processes raises inside, all raise; at the end each waits until all have come through.

    The first error is raised as it is where it came up, and as ParallelError elsewhere; where all meet the same error
    each raises its own. A process that cannot be freed from what it is busy with is ended with the error's exit code.
    After a failure the processes cannot exchange anything any more: end them.

    Args:
        parallel: what `connect` gave.

    Raises:
        ParallelError: another process failed, or gave no sign of life for config.timeout_seconds while this one
            waited for it at the end.
    """
    if not isinstance(parallel.everyone, GroupCollectives):
        yield
        return
    watch = Watch(parallel.everyone.group, parallel.config.timeout_seconds)
    watch.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            watch.wait_for_all()
            raise
        first = watch.report(error)
        if first is None:
            raise
        raise first.elsewhere(watch.size) from error
    else:
        watch.wait_for_all()
    finally:
        watch.stop()
