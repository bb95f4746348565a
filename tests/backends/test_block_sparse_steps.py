"""What block_sparse says about steps and layers, on every backend that owns it; how such layers compile and copy."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from omni_attn import Attention, AttentionMetadata, VideoLayout, attention_report, prepare_attention
from omni_attn.cli.run import report_cells
from omni_attn.ops.block_sparse.rainfusion import _rainfusion_blocks
from omni_attn.ops.block_summary import _raster_blocks
from omni_attn.ops.reference import reference_attention
from omni_attn.products import _logged
from tests.backends import block_summary_layers, rainfusion_layers
from tests.backends.rainfusion_layers import told
from tests.ops.block_inputs import waves


@dataclass(frozen=True)
class Owner:
    """A backend that owns block_sparse.

    Attributes:
        layer: builds one of its layers.
        blocks_of: blocks small enough for `joint`.
        joint: a sequence that is sparse.
        sparse, dense: routes.
        clear: forgets the blocks that calls share.
    """

    layer: Callable[..., Attention]
    blocks_of: Callable[[], AbstractContextManager[None]]
    joint: VideoLayout
    sparse: str
    dense: str
    clear: Callable[[], None]

    @property
    def lengths(self) -> dict[str, tuple[int, int]]:
        return {"self": (self.joint.used_len, self.joint.used_len)}

    def calls(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return waves(self.joint.used_len)

    def record(self, **fields: Any) -> AttentionMetadata:
        return AttentionMetadata(video_layout=self.joint, **fields)


OWNERS = {
    module.__name__.rpartition(".")[2].removesuffix("_layers"): Owner(
        module.layer, module.blocks_of, module.JOINT, module.SPARSE, module.DENSE, clear
    )
    for module, clear in (
        (rainfusion_layers, _rainfusion_blocks.cache_clear),
        (block_summary_layers, _raster_blocks.cache_clear),
    )
}


@pytest.fixture(params=OWNERS)
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    _logged.clear()
    found = OWNERS[request.param]
    with found.blocks_of():
        yield found


def test_the_first_and_the_last_steps_are_dense(owner: Owner) -> None:
    attention, calls = owner.layer(sparsity=0.5, start_step=2, end_step=1), owner.calls()
    record, routes, outputs = owner.record(num_steps=5), [], []
    for step in range(5):
        stated = record.at_step(step)
        prepare_attention(attention, {"self": stated}, owner.lengths)
        routes.append(attention.route)
        outputs.append(attention(*calls, stated))
    assert routes == [owner.dense, owner.dense, owner.sparse, owner.sparse, owner.dense]
    torch.testing.assert_close(outputs[1], reference_attention(*calls)[0])
    assert torch.equal(outputs[0], outputs[4]) and torch.equal(outputs[2], outputs[3])
    assert not torch.equal(outputs[1], outputs[2])
    assert attention.routes_taken == {owner.dense: 3, owner.sparse: 2}
    # What a run prints at its end is not the last step alone.
    reason = report_cells(attention_report(attention).rows[0])[-1]
    taken = f"ran {owner.dense} in the last step; prepared: {owner.dense} 3 times, {owner.sparse} 2 times"
    assert reason.endswith(taken)


def test_a_step_or_layer_that_nobody_stated_is_sparse_and_says_what_was_not_applied(
    owner: Owner, caplog: pytest.LogCaptureFixture
) -> None:
    attention = owner.layer(sparsity=0.5, start_step=2, end_step=1, skip_layers="0-2")
    attention(*owner.calls(), owner.record())
    assert attention.route == owner.sparse
    for part in ("skip_layers is not applied", "start_step is not applied", "end_step is not applied"):
        assert part in (attention.route_reason or "")
        assert part in told(caplog, logging.WARNING)[0]


def test_only_gated_steps_are_prepared_one_by_one(owner: Owner) -> None:
    record = owner.record(num_steps=5)
    for options, kept in (({}, True), ({"start_step": 1}, False), ({"end_step": 1}, False)):
        attention = owner.layer(sparsity=0.5, **options)
        first = record.at_step(3)
        prepare_attention(attention, {"self": first}, owner.lengths)
        assert (first.at_step(4).prepared(attention.group_id) is not None) == kept


def test_skipped_layers_are_dense_and_share_what_is_prepared(owner: Owner) -> None:
    names = ["blocks.0.attn1", "blocks.1.attn1", "stage.blocks.2.attn1", "refiner.attn"]
    model = nn.ModuleList([owner.layer(prefix=name, sparsity=0.5, skip_layers="0,2") for name in names])
    groups = [attention.group_id for attention in model]  # type: ignore[union-attr]
    assert groups[0] == groups[2] and len(set(groups)) == 3
    prepare_attention(model, {"self": owner.record()}, owner.lengths)
    rows = {row.route: row for row in attention_report(model)}
    assert rows[owner.dense].layers == 2 and "skip_layers 0, 2" in rows[owner.dense].reason
    routes = [attention.route for attention in model]  # type: ignore[union-attr]
    assert routes == [owner.dense, owner.sparse, owner.dense, owner.sparse]
    same = [owner.layer(prefix=name, sparsity=0.5).group_id for name in names]
    assert len(set(same)) == 1  # nobody is skipped: numbers do not matter


def test_equal_blocks_compile_one_frame(owner: Owner) -> None:
    torch.compiler.reset()
    layers = nn.ModuleList(
        [owner.layer(prefix=f"blocks.{n}", sparsity=0.5, skip_layers=[0]) for n in range(12)]
    )
    record, calls = owner.record(), owner.calls()
    prepare_attention(layers, {"self": record}, owner.lengths)
    frames = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(Attention.forward, fullgraph=True, backend=count)
    with torch.no_grad():
        outputs = [compiled(attention, *calls, record) for attention in layers]
        for attention, output in zip(layers, outputs, strict=True):
            torch.testing.assert_close(output, attention(*calls, record))
    assert len(frames) == 2  # a dense one and a sparse one
    assert not torch.equal(outputs[0], outputs[1])


def test_a_call_of_fakes_leaves_nothing_behind(owner: Owner) -> None:
    attention, calls, record = owner.layer(sparsity=0.5), owner.calls(), owner.record()
    owner.clear()
    with FakeTensorMode() as fakes:
        assert attention(*map(fakes.from_tensor, calls), record).shape == calls[0].shape
    assert attention.route == owner.sparse and attention(*calls, record).shape == calls[0].shape


@pytest.mark.parametrize("made", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_run_alike(owner: Owner, made: Any) -> None:
    attention, calls, record = owner.layer(sparsity=0.5), owner.calls(), owner.record()
    assert torch.equal(made(attention)(*calls, record), attention(*calls, record))
