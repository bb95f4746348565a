"""Block tables reach the GPU in order, without anybody waiting for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omni_attn.kv_cache import BlockPool, BlockTable, StepInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU need one"),
]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("no_waiting")
def test_the_host_runs_ahead_and_each_step_finds_its_own_pages() -> None:
    """The GPU is kept busy while the host edits its mirror for many later steps."""
    there, here = (BlockTable(BlockPool(400), 8, 2, 64, device) for device in ("cuda", "cpu"))
    seen: list[list[torch.Tensor]] = []
    expected: list[list[torch.Tensor]] = []
    addresses = set()
    steps = {table: StepInputs(table) for table in (there, here)}
    for table in steps:
        for stream in "ab":
            table.add(stream)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    for turn in range(12):
        for table, step in steps.items():
            for stream in "ab":
                table.append(stream, 24 + 8 * (turn % 3))
            common = step.common("ab" if turn % 2 else "ba", causal=False)
            assert common.slot_mapping is not None
            tensors = (common.block_table, common.slot_mapping, common.query_start_loc, common.seq_lens)
            (seen if table is there else expected).append([tensor.clone() for tensor in tensors])
            if table is there:
                addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
            for stream in "ab":
                table.commit(stream)
                table.evict(stream, window=48, sink=16)
    torch.cuda.set_sync_debug_mode("default")
    assert len(addresses) == 1
    for on_gpu, on_cpu in zip(seen, expected, strict=True):
        for found, wanted in zip(on_gpu, on_cpu, strict=True):
            assert torch.equal(found.cpu(), wanted)
