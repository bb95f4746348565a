"""Exchanges through shared memory are those of the collectives, to the bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from omni_attn import prepare_attention
from omni_attn.parallel import Parallel, use_parallel
from omni_attn.parallel.collectives import Collectives, Pending, start_shift
from omni_attn.parallel.outbox import Counts, Rows
from omni_attn.parallel.peers import PeerCollectives
from omni_attn.testing import fake_ranks
from omni_attn.testing.ranks import ThreadCollectives
from tests.parallel.counted import PassedOn
from tests.parallel.scene import Call, randn
from tests.parallel.shared_memory import ThreadMemory, through_memory

CONFIGS: dict[str, dict[str, Any]] = {
    "ulysses 2": {"ulysses_degree": 2},
    "ulysses 4": {"ulysses_degree": 4},
    "ring 3": {"ring_degree": 3},
    "ulysses 2 ring 2": {"ulysses_degree": 2, "ring_degree": 2},
    "pieces": {"ulysses_degree": 2, "head_pieces": 3},
}
CALLS = {
    "odd": Call(11, heads=7),
    "grouped": Call(9, heads=12, kv_heads=6, value_size=12),
    "fewer heads than ranks": Call(9, heads=1),
    "fewer tokens than ranks": Call(2, heads=6),
    "keys of another length": Call(7, 10, heads=6),
    "joint": Call(9, heads=6, joint=(2, 5), order="rear"),
    "causal": Call(9, heads=6, needs={"causal": True}),
}


class Nothing(PassedOn):
    """Exchanges nothing of all with all."""

    def start_all_to_all(self, outbox: Rows) -> Pending:
        assert not any((*outbox.counts.send, *outbox.counts.receive)), "not through memory"
        return self.inner.start_all_to_all(outbox)


def attend(call: Call, parallel: Parallel) -> Tensor:
    with use_parallel(parallel):
        layer, record = call.layer(), call.record()
        prepare_attention(layer, {"self": record}, {"self": call.whole_lengths})
        return layer(
            *(parallel.split(tensor) for tensor in call.own), record.with_layer_inputs(**call.streams)
        )


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_same_bits_as_the_collectives(config: dict[str, Any], call: Call) -> None:
    def work(parallel: Parallel) -> None:
        with torch.no_grad():
            expected = attend(call, parallel)
            through = through_memory(parallel)
            for group in (through.ulysses, through.ring):
                if isinstance(group, PeerCollectives):
                    group.inner = Nothing(group.inner)  # type: ignore[assignment]
            assert torch.equal(attend(call, through), expected)

    fake_ranks(config, work)


@pytest.mark.parametrize(
    "calls",
    [
        [Call(9, heads=2), Call(12, heads=2)],
        [Call(8, heads=1), Call(12, heads=1)],
        [Call(7, heads=3), Call(7, heads=2), Call(7, heads=3)],
        [Call(6, 7, heads=4), Call(9, 10, heads=4)],
        [Call(1, heads=2), Call(5, heads=2, joint=(2, 3))],
    ],
    ids=["uneven tokens", "a rank without heads", "uneven heads", "other keys", "a rank without tokens"],
)
@pytest.mark.parametrize("ring_degree", [2, 3])
def test_all_ranks_share_memory_as_often_and_as_much(calls: list[Call], ring_degree: int) -> None:
    """Also those that are in no group together: torch counts for a process how often it shared any."""

    def work(parallel: Parallel) -> list[list[int]]:
        through = through_memory(parallel)
        with torch.no_grad():
            for call in calls:
                attend(call, through)
        groups = (through.ulysses, through.ring)
        return [group.memory.taken for group in groups if isinstance(group, PeerCollectives)]  # type: ignore[attr-defined]

    first, *others = fake_ranks({"ulysses_degree": 2, "ring_degree": ring_degree}, work)
    assert all(first) and all(other == first for other in others)


@pytest.mark.parametrize("name", ["query", "value"])
def test_gradients_go_through_the_collectives(name: str) -> None:
    call = Call(9, heads=6)
    leaf = call.own[0 if name == "query" else 2].requires_grad_()
    taken: list[int] = []

    def work(parallel: Parallel) -> Tensor:
        through = through_memory(parallel)
        assert isinstance(through.ulysses, PeerCollectives)
        assert isinstance(through.ulysses.memory, ThreadMemory)
        through.ulysses.memory.taken = taken
        return attend(call, through)

    together = torch.cat(fake_ranks({"ulysses_degree": 2}, work), dim=1)
    assert not taken
    (found,) = torch.autograd.grad(together.square().sum(), leaf)
    (wanted,) = torch.autograd.grad(call.alone().square().sum(), leaf)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def group_of(parallel: Parallel) -> tuple[PeerCollectives, ThreadMemory]:
    assert isinstance(parallel.everyone, ThreadCollectives)
    memory = ThreadMemory(parallel.everyone)
    return PeerCollectives(parallel.everyone, memory), memory


@given(st.data())
def test_all_with_all(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    matrix = data.draw(
        st.lists(st.lists(st.integers(0, 5), min_size=size, max_size=size), min_size=size, max_size=size)
    )
    dtype = data.draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]))
    more = data.draw(st.integers(0, 3))
    largest = max(map(max, matrix)) + more
    filled = data.draw(st.booleans())

    def work(parallel: Parallel) -> None:
        rank, (group, memory) = parallel.rank, group_of(parallel)
        counts = Counts(matrix[rank], [row[rank] for row in matrix], largest)
        rows = torch.arange(sum(counts.send)).add(50 * rank).to(dtype)
        expected = parallel.everyone.wait(parallel.everyone.start_all_to_all(Rows(rows, counts)))
        if filled:
            outbox = group.outbox([rows], counts)
            for number in range(size):
                for ranks, parcels in outbox.parcels(range(number, number + 1)):
                    assert ranks == range(number, number + 1)
                    parcels[0].copy_(rows.split_with_sizes(counts.send)[number])
            pending = group.start_all_to_all(outbox)
        else:
            pending = group.start_all_to_all(Rows(rows, counts))
        assert torch.equal(group.wait(pending), expected)
        assert len(memory.taken) == (1 if largest else 0)

    fake_ranks({"ulysses_degree": size}, work)


def test_parcels_of_other_ranks_alone_take_memory() -> None:
    """7 numbers of 2 bytes: a parcel begins at a multiple of 16 bytes."""

    def work(parallel: Parallel) -> None:
        group, memory = group_of(parallel)
        counts = Counts([7] * 3, [7] * 3, 7)
        group.wait(group.start_all_to_all(Rows(torch.ones(21, dtype=torch.bfloat16), counts)))
        assert memory.taken == [2 * 16]

    fake_ranks({"ring_degree": 3}, work)


def test_a_shift_takes_memory_for_one_parcel() -> None:
    def work(parallel: Parallel) -> None:
        group, memory = group_of(parallel)
        own = torch.full((8,), parallel.rank, dtype=torch.float32)
        arrived = group.wait(start_shift(group, [own], 8, 8))
        assert arrived.tolist() == [(parallel.rank + 1) % 4] * 8 and memory.taken == [32]

    fake_ranks({"ring_degree": 4}, work)


def test_what_nobody_waits_for_is_kept() -> None:
    """An error came between: others still read the region, and the copies still write."""

    def work(parallel: Parallel) -> None:
        group, _ = group_of(parallel)
        pending = group.start_all_to_all(Rows(torch.ones(2), Counts([1, 1], [1, 1], 1)))
        rows, region = (weakref.ref(kept) for kept in pending)
        del pending
        assert rows() is not None and region() is not None
        (under_way,) = group._under_way.values()
        group.wait(under_way)
        del under_way
        assert rows() is None and region() is None

    fake_ranks({"ulysses_degree": 2}, work)


def unstated(group: PeerCollectives, rows: Tensor) -> Pending:
    return group.start_all_to_all(Rows(rows.flatten(), Counts([4, 4], [4, 4])))


def recorded(group: PeerCollectives, rows: Tensor) -> Pending:
    return group.start_all_to_all(Rows(rows.flatten().requires_grad_(), Counts([4, 4], [4, 4], 4)))


def gathered(group: PeerCollectives, rows: Tensor) -> Pending:
    return group.start_all_gather(rows)


@pytest.mark.parametrize("start", [unstated, recorded, gathered])
def test_what_goes_as_the_collectives_do(start: Callable[[PeerCollectives, Tensor], Pending]) -> None:
    def work(parallel: Parallel) -> None:
        group, memory = group_of(parallel)
        rows = randn(2, 4, seed=parallel.rank)
        arrived, expected = group.wait(start(group, rows)), start(parallel.everyone, rows)  # type: ignore[arg-type]
        assert torch.equal(arrived, expected) and not memory.taken
        assert group.share_counts([parallel.rank]) == ((0,), (1,))

    fake_ranks({"ulysses_degree": 2}, work)


def test_a_layer_says_which_way_it_takes() -> None:
    class ByNccl(PassedOn):
        way = "over NCCL (their GPUs lie on 2 hosts)"

    def told(parallel: Parallel, group: Collectives) -> str:
        with use_parallel(replace(parallel, ulysses=group, ring=group)):
            return Call(heads=4).layer().parallel or ""

    for config, start in (
        ({"ulysses_degree": 2}, "2 ranks trade tokens for heads, 2 of 4 heads each"),
        ({"ring_degree": 2}, "2 ranks hand keys and values round, each attends to all keys in turn"),
    ):

        def work(parallel: Parallel, start: str = start) -> None:
            assert told(parallel, parallel.everyone) == start
            assert told(parallel, group_of(parallel)[0]) == f"{start}, through one another's memory"
            assert told(parallel, ByNccl(parallel.everyone)) == f"{start}, {ByNccl.way}"  # type: ignore[arg-type]

        fake_ranks(config, work)
