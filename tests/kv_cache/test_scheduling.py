"""Streams come, write, commit, forget and go in any order, held against lists of what each should still see."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_attn.errors import KVCacheError
from omni_attn.kv_cache import BlockPool, BlockTable, StepInputs, check_slots

PAGE, PAGES, ROWS, WIDTH = 3, 14, 3, 6
UNWRITTEN = -1
"""A token that no step wrote: whatever stands in its slot."""


class Scheduling(RuleBasedStateMachine):
    """Two tables share one pool, and a cache in which every token is a number."""

    def __init__(self) -> None:
        super().__init__()
        pool = BlockPool(PAGES)
        self.tables = [BlockTable(pool, PAGE, ROWS, WIDTH, "cpu", group=name) for name in ("self", "cross")]
        self.steps = [StepInputs(table) for table in self.tables]
        self.memory = torch.full((PAGES * PAGE,), -1)
        self.token = count()
        self.history: list[dict[Hashable, list[int]]] = [{}, {}]
        self.open: list[dict[Hashable, list[int]]] = [{}, {}]
        self.begun: list[dict[Hashable, int]] = [{}, {}]

    def some(self, data: st.DataObject, *, chunk: bool | None = None) -> tuple[int, Hashable] | None:
        found = [
            (at, stream)
            for at in range(2)
            for stream in self.history[at]
            if chunk is None or chunk == (stream in self.open[at])
        ]
        return data.draw(st.sampled_from(found)) if found else None

    @initialize()
    def begin(self) -> None:
        for at in range(2):
            self.add(at, 0)

    @rule(at=st.integers(0, 1), stream=st.integers(0, 4))
    def add(self, at: int, stream: int) -> None:
        if stream in self.history[at] or len(self.history[at]) == ROWS:
            with pytest.raises(KVCacheError):
                self.tables[at].add(stream)
            return
        self.tables[at].add(stream)
        self.history[at][stream] = []
        self.begun[at][stream] = 0

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if (found := self.some(data)) is not None:
            at, stream = found
            self.tables[at].remove(stream)
            for known in (self.history, self.open, self.begun):
                known[at].pop(stream, None)

    @rule(data=st.data(), tokens=st.integers(1, 8))
    def append(self, data: st.DataObject, tokens: int) -> None:
        if (found := self.some(data, chunk=False)) is None:
            return
        at, stream = found
        have = len(self.history[at][stream])
        more = -(-(have + tokens) // PAGE) - -(-have // PAGE)
        if have + tokens > WIDTH * PAGE or more > self.free():
            with pytest.raises(KVCacheError):
                self.tables[at].append(stream, tokens)
            return
        self.tables[at].append(stream, tokens)
        self.open[at][stream] = [UNWRITTEN] * tokens

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """All open chunks of a table are written, in any order; again and again, as denoising does."""
        at = data.draw(st.integers(0, 1))
        if not self.open[at]:
            return
        streams = data.draw(st.permutations(list(self.open[at])))
        common = self.steps[at].common(streams)
        slots = common.slot_mapping
        assert slots is not None
        check_slots(slots, PAGES, PAGE)
        new = [next(self.token) for _ in slots]
        self.memory[slots] = torch.tensor(new)
        starts = common.query_start_loc.tolist()
        for stream, begin, end in zip(streams, starts[:-1], starts[1:], strict=True):
            self.open[at][stream] = new[begin:end]
        self.check_rows(streams, at)

    @rule(data=st.data(), rejected=st.integers(0, 9))
    def commit(self, data: st.DataObject, rejected: int) -> None:
        if (found := self.some(data, chunk=True)) is None:
            return
        at, stream = found
        chunk = self.open[at].pop(stream)
        accepted = chunk[: max(0, len(chunk) - rejected)] if rejected < 5 else chunk
        self.tables[at].commit(stream, None if rejected >= 5 else len(accepted))
        self.history[at][stream] += accepted

    @rule(data=st.data(), window=st.integers(0, 5), sink=st.integers(0, 5), exact=st.booleans())
    def evict(self, data: st.DataObject, window: int, sink: int, exact: bool) -> None:
        if (found := self.some(data)) is None:
            return
        at, stream = found
        history = self.history[at][stream]
        edge = len(history) - window
        if exact and edge > sink and (edge % PAGE or sink % PAGE):
            with pytest.raises(KVCacheError):
                self.tables[at].evict(stream, window=window, sink=sink)
            return
        left = [
            token
            for place, token in enumerate(history)
            if place // PAGE * PAGE < sink or (place // PAGE + 1) * PAGE > edge
        ]
        assert self.tables[at].evict(stream, window=window, sink=sink, exact=exact) == len(history) - len(
            left
        )
        self.history[at][stream] = left
        self.begun[at][stream] += len(history) - len(left)

    @rule(at=st.integers(0, 1))
    @precondition(lambda self: any(self.history))
    def read(self, at: int) -> None:
        self.check_rows(list(self.history[at]), at)

    def check_rows(self, streams: Sequence[Hashable], at: int) -> None:
        if not streams:
            return
        lens = [1 for _ in streams]
        common = self.steps[at].common(streams, query_lens=lens, write=False)
        for row, stream in enumerate(streams):
            token = torch.arange(int(common.seq_lens[row]))
            page = common.block_table[row, token // PAGE].long()
            expected = self.history[at][stream] + self.open[at].get(stream, [])
            found = self.memory[page * PAGE + token % PAGE].tolist()
            assert [
                UNWRITTEN if known == UNWRITTEN else seen for seen, known in zip(found, expected, strict=True)
            ] == (expected)
            assert not common.block_table[row, -(-len(token) // PAGE) :].any()

    def free(self) -> int:
        held = sum(
            -(-(len(history) + len(self.open[at].get(stream, []))) // PAGE)
            for at in range(2)
            for stream, history in self.history[at].items()
        )
        return PAGES - 1 - held

    @invariant()
    def pages_belong_to_one_stream(self) -> None:
        held = [page for table in self.tables for stream in table.streams for page in table.pages(stream)]
        assert len(set(held)) == len(held)
        assert 0 not in held
        assert self.tables[0].pool.num_free == self.free() == PAGES - 1 - len(held)

    @invariant()
    def positions_count_what_is_gone(self) -> None:
        for at, table in enumerate(self.tables):
            for stream, history in self.history[at].items():
                assert table.kept(stream) == len(history)
                assert table.position(stream) == self.begun[at][stream] + len(history)


Scheduling.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
test_any_order = Scheduling.TestCase
