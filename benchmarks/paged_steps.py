"""Host time of what happens once per step or chunk: metadata of many layers over one page table.

Layers, tables and caches are those of causal Wan 1.3B at 480p, 40 layers of them; nothing attends. The device's queue
is empty before each round.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from benchmarks.dispatch_overhead import host_microseconds
from benchmarks.paged_calls import spec_of
from benchmarks.paged_inputs import PagedCase
from benchmarks.rounds import first_line, shuffled_rounds
from omni_attn import use_attention_config
from omni_attn.kv_cache import (
    AttentionGroup,
    BlockPool,
    BlockTable,
    CommonAttentionMetadata,
    StepInputs,
    allocate_kv_cache,
    init_attention_groups,
    make_step,
    split_pages,
)
from omni_attn.paged_layer import PagedAttention

LAYERS = 40
CALLS = 40
PARTS = ("build", "step", "same step", "chunk")
"""One builder's build; a step of all layers after something changed, before anything did, and after a new chunk."""


@dataclass
class HostRow:
    """What was found about one backend.

    Attributes:
        microseconds: part -> median.
        syncs: part -> how often one call of it waits for the device; None on a CPU.
        problem: why there is nothing.
    """

    name: str
    microseconds: dict[str, float] = field(default_factory=dict)
    syncs: dict[str, int] | None = None
    problem: str = ""


class StepsOfLayers:
    """Steps of one stream over one page table, for layers on one backend.

    Args:
        case: a chunk and its history, which is also the window.
    """

    def __init__(self, word: str, case: PagedCase, device: torch.device, dtype: torch.dtype) -> None:
        self._case = case
        spec = case.spec(dtype)
        width = -(-case.keys // case.block_size)
        lengths = {"self": (case.query_len, case.keys)}
        with use_attention_config(spec_of(word), device=device, dtype=dtype, lengths=lengths):
            layers = [
                PagedAttention(
                    case.heads, case.head_size, role="self", num_kv_heads=case.kv_heads, causal=False,
                    kv_cache=spec, prefix=f"layer {number}",
                )
                for number in range(LAYERS)
            ]  # fmt: skip
        self._groups = init_attention_groups(layers, {"self": spec}, device)
        (self.group,) = self._groups
        # Nobody reads a page here: all layers may have the same ones.
        cache = allocate_kv_cache(spec, 2 * width + 1, "NHD", device)
        pages = split_pages(cache, self.group.kernel_spec.block_size)
        self._caches = {layer.prefix: pages for layer in layers}
        pool = BlockPool(2 * width + 1)
        self._tables = [BlockTable(pool, case.block_size, 1, width, device) for _ in range(2)]
        self._inputs = [StepInputs(table) for table in self._tables]
        for table in self._tables:
            table.add("video")
            table.append("video", case.history)
            table.commit("video")
            table.append("video", case.query_len)
        self._turn = 0

    def _common(self) -> CommonAttentionMetadata:
        return self._inputs[self._turn].common(["video"], causal=False)

    def parts(self) -> dict[str, Callable[[], object]]:
        """What is timed, by the names of PARTS."""
        group: AttentionGroup = self.group
        builder, common = group.builder(), group.for_kernel(self._common())
        return {
            "build": lambda: builder.build(common),
            "step": self._other_step,
            "same step": self._step,
            "chunk": self._next_chunk,
        }

    def _step(self) -> object:
        return make_step(self._groups, {"self": self._common()}, self._caches)

    def _other_step(self) -> object:
        """The other one of two streams with tables of their own: nothing that was built for the last step is right."""
        self._turn = 1 - self._turn
        return self._step()

    def _next_chunk(self) -> object:
        """Commits the chunk, forgets as much of the history, opens another one, and makes its first step."""
        table, case = self._tables[self._turn], self._case
        table.commit("video")
        table.evict("video", window=case.history)
        table.append("video", case.query_len)
        return self._step()


def host_rows(
    words: Iterable[str], case: PagedCase, device: torch.device, dtype: torch.dtype, *, rounds: int, seed: int
) -> list[HostRow]:
    """A row for each backend, shuffled rounds of all parts of all of them."""
    rows, timed = [], list[tuple[HostRow, str, Callable[[], object]]]()
    for word in words:
        row = HostRow(word)
        rows.append(row)
        try:
            steps = StepsOfLayers(word, case, device, dtype)
            row.name = f"{word}: {steps.group.selection.label}"
            parts = steps.parts()
            for call in parts.values():  # packages load and kernels compile at their first use
                call()
            row.syncs = (
                {part: device_waits(call) for part, call in parts.items()} if device.type == "cuda" else None
            )
        except Exception as error:  # a package may raise anything
            row.problem = first_line(error)
            continue
        timed += [(row, part, call) for part, call in parts.items()]
    found: dict[tuple[int, str], list[float]] = {}
    for _, (row, part, call) in shuffled_rounds(timed, rounds, seed):
        found.setdefault((id(row), part), []).append(host_microseconds(call, CALLS))
    for row, part, _ in timed:
        row.microseconds[part] = statistics.median(found[id(row), part])
    return rows


def device_waits(call: Callable[[], object]) -> int:
    """How often a call waits for a CUDA device, as torch's own watch over its operations counts it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in found)
