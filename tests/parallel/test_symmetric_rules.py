"""Which memory is taken, kept and refused, without a GPU: torch's part is replaced."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_attn.errors import ConfigError, MetadataError
from omni_attn.parallel import sharing
from omni_attn.parallel.sharing import why_not
from omni_attn.parallel.symmetric import SymmetricMemory, SymmetricRegion

GIGABYTE = 1 << 30
CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, *, capturing: bool = False) -> None:
        self.capturing, self.follows = capturing, list[Any]()

    def wait_stream(self, other: Stream) -> None:
        self.follows.append(other)

    def wait_event(self, event: object) -> None:
        self.follows.append(event)

    def record_event(self) -> object:
        return object()


class Machine:
    """Streams, regions and what other ranks say."""

    def __init__(self) -> None:
        self.current = Stream()
        self.waits = list[Stream]()
        self.shared = list[int]()
        self.said: dict[str, list[Any]] = {}
        self.has_room, self.could_have_room = True, False
        self.backend: str | None = "CUDA"

    def empty_cache(self) -> None:
        self.has_room = self.could_have_room

    def allocate(self, size: tuple[int, ...], *_: object) -> Tensor:
        if not self.has_room:
            raise RuntimeError("out of memory\nand more")
        return torch.empty(size, device="meta", dtype=torch.uint8)

    def rendezvous(self, tensor: Tensor, group: object) -> Any:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        self.shared.append(tensor.numel())
        return SimpleNamespace(barrier=lambda *_: self.waits.append(self.current))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()

    class On:
        def __init__(self, stream: Stream) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before, made.current = made.current, self.stream

        def __exit__(self, *_: object) -> None:
            made.current = self.before

    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.setattr(sharing, "_failed", "")
    monkeypatch.setattr(sharing, "_SymmetricMemory", SimpleNamespace(empty_strided_p2p=made.allocate))
    monkeypatch.setattr(sharing.symmetric, "rendezvous", made.rendezvous)
    monkeypatch.setattr(sharing.symmetric, "get_backend", lambda device: made.backend)
    monkeypatch.setattr(sharing, "_of_all", lambda group, said: [said, *made.said.get(str(said), [])])
    monkeypatch.setattr(sharing, "_host", lambda: "here")
    monkeypatch.setattr(sharing.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", made.empty_cache)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.current)
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.current.capturing)
    return made


def memory() -> SymmetricMemory:
    return SymmetricMemory(SimpleNamespace(rank=lambda: 1), CUDA, 60)  # type: ignore[arg-type]


def used(own: SymmetricMemory, size: int) -> SymmetricRegion:
    region = own.take(size)
    with region.reading():
        pass
    region.give_back()
    return region


def test_the_smallest_that_fits_is_taken_again(machine: Machine) -> None:
    own = memory()
    large, small = own.take(GIGABYTE), own.take(1 << 20)
    for region in (large, small):
        with region.reading():
            pass
        region.give_back()
    assert own.take(1000) is small and own.take(1000) is large
    assert machine.shared == [GIGABYTE, 1 << 20]


@pytest.mark.parametrize("size", [1, 1 << 20, (1 << 20) + 1, 10**8, 581_000_000, GIGABYTE + 1])
def test_growing_little_by_little_shares_anew_seldom(machine: Machine, size: int) -> None:
    own = memory()
    region = used(own, size)
    assert size <= region.size <= 1.25 * size + (1 << 20)
    assert used(own, region.size) is region
    assert used(own, region.size + 1) is not region and len(own.free) == 1, "what is too small goes"


def test_who_waits_for_all_is_on_the_stream_of_the_kernels(machine: Machine) -> None:
    own = memory()
    region = own.take(8)
    with region.reading():
        assert machine.waits == [machine.waits[0]] and machine.current is own.stream
        assert own.stream.follows == machine.waits  # type: ignore[attr-defined]
    assert machine.current is machine.waits[0]
    region.give_back()
    assert machine.waits == [machine.current] * 2
    assert len(machine.current.follows) == 1, "the end of the copies"


def test_another_stream_writes_behind_the_last_readers(machine: Machine) -> None:
    own = memory()
    region, first = used(own, 8), machine.current
    assert own.take(8) is region and not [found for found in first.follows if isinstance(found, Stream)]
    own.free.append(region)
    machine.current = Stream()
    assert own.take(8) is region and machine.current.follows == [first]


def test_a_graph_keeps_its_memory_and_gets_no_new(machine: Machine) -> None:
    own, outside = memory(), machine.current
    used(own, 8)
    machine.current = Stream(capturing=True)
    captured = used(own, 8)
    assert not [found for found in machine.current.follows if found is outside], (
        "a graph waits for nothing outside"
    )
    with pytest.raises(
        MetadataError, match=r"cannot get them while a graph is captured: run the same step once"
    ):
        own.take(GIGABYTE)
    machine.current = outside
    larger = used(own, GIGABYTE)
    assert own.free == [captured, larger]


def test_a_step_that_ran_once_can_be_captured(machine: Machine) -> None:
    """Two exchanges under way at once, then a large one: as much stays as the step needs."""
    own = memory()

    def step() -> None:
        small = [own.take(10**7) for _ in range(2)]
        for region in small:
            with region.reading():
                pass
            region.give_back()
        used(own, 10**8)

    step()
    machine.current = Stream(capturing=True)
    step()
    assert len(machine.shared) == 3


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_memory_is_not_written_to_all_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    if before is not None:
        monkeypatch.setenv(name, before)
    memory().take(8)
    assert machine.shared and os.environ.get(name) == before


def test_memory_that_torch_keeps_for_tensors_is_used(machine: Machine) -> None:
    machine.has_room, machine.could_have_room = False, True
    assert memory().take(8).size == 1 << 20


def test_no_room_on_one_rank_is_told_on_all_before_any_waits(machine: Machine) -> None:
    machine.has_room = False
    with pytest.raises(
        ConfigError, match=r"symmetric_memory: rank 1 got no 1048576 bytes to share: out of memory\."
    ):
        memory().take(8)
    machine.has_room = True
    machine.said[""] = ["rank 0 got no 1048576 bytes to share: full"]
    with pytest.raises(ConfigError, match="rank 0 got no 1048576 bytes to share: full"):
        memory().take(8)
    assert not machine.shared


@pytest.fixture
def two_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
    machine.said["('here', 0)"] = [("here", 1)]
    return machine


def reason() -> str:
    return why_not(SimpleNamespace(), CUDA)  # type: ignore[arg-type]


def test_two_gpus_of_one_host(two_gpus: Machine) -> None:
    assert reason() == ""
    assert two_gpus.shared == [4096]


def test_two_hosts(two_gpus: Machine) -> None:
    two_gpus.said["('here', 0)"] = [("there", 0)]
    assert reason() == "their GPUs lie on 2 hosts" and not two_gpus.shared


def test_gpus_that_do_not_reach_one_another(two_gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    assert reason() == "GPU 0 does not reach the memory of GPU 1" and not two_gpus.shared


def test_gpus_that_this_process_does_not_see(two_gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", None)
    assert reason() == ""


def test_another_groups_ranks_cannot(two_gpus: Machine) -> None:
    """All go the same way: torch counts what each process shares."""
    two_gpus.said[""] = ["GPU 3 does not reach the memory of GPU 2"]
    assert reason() == "GPU 3 does not reach the memory of GPU 2" and not two_gpus.shared


@pytest.mark.parametrize("text", ["not permitted\nmore", ""])
def test_sharing_that_fails(two_gpus: Machine, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(sharing.symmetric, "rendezvous", fail)
    told = f"rank 1 cannot share memory: {'not permitted' if text else 'RuntimeError'}"
    assert reason() == told
    monkeypatch.setattr(sharing.symmetric, "rendezvous", None)
    assert reason() == told, "nobody tries again"


def test_no_room_while_trying(two_gpus: Machine) -> None:
    two_gpus.has_room = False
    assert reason() == "rank 1 got no 4096 bytes to share: out of memory" and not two_gpus.shared


def test_another_way_of_sharing(two_gpus: Machine) -> None:
    two_gpus.backend = "NVSHMEM"
    assert reason() == "torch's symmetric memory is set to NVSHMEM, and CUDA is needed"


def test_this_host() -> None:
    assert sharing._host() == sharing._host() and len(sharing._host()) == 3


def test_a_torch_without_it(two_gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "symmetric", None)
    assert reason() == f"torch {torch.__version__} has no symmetric memory"
