"""Gates of video sparse attention: projected where they are read, left out while they are known to be shut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from omni_attn import prepare_attention
from omni_attn.models.minimax_h3.gate import CompressionGate, look_at_gates
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from tests.models.minimax_h3.sparse_models import SPARSE, SPARSE_KIND, run, sparse_model
from tests.models.minimax_h3.tiny_models import build_inputs, build_model


def gates(model: MiniMaxH3Model) -> list[CompressionGate]:
    return [block.attn.to_gate_compress for block in model.transformer_blocks]


@pytest.fixture
def projected(monkeypatch: pytest.MonkeyPatch) -> list[CompressionGate]:
    """The gates that were projected, in order."""
    seen: list[CompressionGate] = []
    original = CompressionGate.forward

    def forward(gate: CompressionGate, rows: torch.Tensor) -> torch.Tensor:
        seen.append(gate)
        return original(gate, rows)

    monkeypatch.setattr(CompressionGate, "forward", forward)
    return seen


def shut_model(config: Any = SPARSE) -> MiniMaxH3Model:
    model = sparse_model(config, gate_compress=True)
    with torch.no_grad():
        for gate in gates(model):
            gate.weight.zero_()
    look_at_gates(model)
    return model


def test_a_gate_has_its_say_in_video_sparse_attention_only(projected: list[CompressionGate]) -> None:
    gated = sparse_model(gate_compress=True)
    plain = sparse_model()
    plain.load_state_dict({k: v for k, v in gated.state_dict().items() if "gate" not in k})
    assert not torch.equal(run(gated, SPARSE_KIND)[0], run(plain, SPARSE_KIND)[0])
    assert projected == gates(gated)
    run(build_model(gate_compress=True), SPARSE_KIND)
    assert len(projected) == 2


def test_a_gate_is_made_from_what_the_projections_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modulated rows, without norm and positions: a gate with the weight of values equals the values."""
    seen: dict[str, list[torch.Tensor]] = {"gate": [], "value": []}
    model = sparse_model(gate_compress=True)
    for block in model.transformer_blocks:
        block.attn.to_gate_compress.weight.data = block.attn.to_v.weight.data
    layer = type(model.transformer_blocks[0].attn.attention)
    original = layer.forward

    def forward(self: Any, query: Any, key: Any, value: Any, metadata: Any = None) -> torch.Tensor:
        if metadata is not None and metadata.layer_inputs:
            seen["gate"].append(metadata.layer_inputs["gate_compress"])
            seen["value"].append(value)
        return original(self, query, key, value, metadata)

    monkeypatch.setattr(layer, "forward", forward)
    run(model, SPARSE_KIND)
    assert len(seen["gate"]) == 2
    assert all(map(torch.equal, seen["gate"], seen["value"]))


def test_a_shut_gate_is_left_out_and_changes_nothing(projected: list[CompressionGate]) -> None:
    model = shut_model()
    skipped = run(model, SPARSE_KIND)
    assert not projected
    for gate in gates(model):
        gate._is_shut = False
    for one, other in zip(run(model, SPARSE_KIND), skipped, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert len(projected) == 2


def test_an_open_gate_or_one_nobody_looked_at_runs(projected: list[CompressionGate]) -> None:
    model = shut_model()
    _, second = gates(model)
    with torch.no_grad():
        second.weight[-1, -1] = 1e-3
    look_at_gates(model)
    run(model, SPARSE_KIND)
    assert projected == [second]
    unseen = sparse_model(gate_compress=True)
    for gate in gates(unseen):
        gate.weight.data.zero_()
    run(unseen, SPARSE_KIND)
    assert projected[1:] == gates(unseen)


def train(model: MiniMaxH3Model) -> None:
    kind = SPARSE_KIND
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    records = model.attention_records(kind.layout)
    prepare_attention(model, records, model.config.attention_lengths(kind.rows, kind.text))
    video, _ = model(**build_inputs(kind, batch=1), attention_records=records)
    video.square().mean().backward()
    optimiser.step()


def test_a_shut_gate_learns_and_is_not_left_out_afterwards(projected: list[CompressionGate]) -> None:
    model = shut_model()
    train(model)
    assert len(projected) == 2
    assert all(gate.weight.grad is not None and gate.weight.any() for gate in gates(model))
    run(model, SPARSE_KIND)
    assert len(projected) == 4


def change_in_place(gate: CompressionGate) -> None:
    with torch.no_grad():
        gate.weight.add_(0.1)


def load_into(gate: CompressionGate) -> None:
    gate.load_state_dict({"weight": torch.ones_like(gate.weight)})


def load_in_place_of(gate: CompressionGate) -> None:
    gate.load_state_dict({"weight": torch.ones_like(gate.weight)}, assign=True)


def replace_data(gate: CompressionGate) -> None:
    gate.weight.data = torch.ones_like(gate.weight)


def replace_parameter(gate: CompressionGate) -> None:
    gate.weight = torch.nn.Parameter(torch.ones_like(gate.weight))


@pytest.mark.parametrize(
    "change", [change_in_place, load_into, load_in_place_of, replace_data, replace_parameter]
)
def test_a_changed_weight_is_never_taken_for_a_shut_gate(
    change: Any, projected: list[CompressionGate]
) -> None:
    model = shut_model()
    for gate in gates(model):
        change(gate)
    run(model, SPARSE_KIND)
    assert len(projected) == 2


def test_a_shut_gate_stays_known_where_the_model_moves(projected: list[CompressionGate]) -> None:
    model = shut_model().to(torch.float64)
    assert all(gate._is_shut for gate in gates(model))
    assert not any(gate._is_shut for gate in gates(sparse_model(gate_compress=True).to(torch.float64)))
    emptied = shut_model().to_empty(device="meta")
    assert not any(gate._is_shut for gate in gates(emptied))
    assert not projected


def test_inside_inference_mode(projected: list[CompressionGate]) -> None:
    with torch.inference_mode():
        model = shut_model()
        run(model, SPARSE_KIND)
    assert not projected


def test_a_coarse_output_of_weight_one_is_shut_by_the_gate(projected: list[CompressionGate]) -> None:
    """Without a gate these options add the coarse output as it is, so a shut gate cannot be left out."""
    options = SPARSE["per_role"]["self"]["fastvideo_vsa"] | {"coarse_weight": "one"}
    config = {"per_role": {"self": {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": options}}}
    found, expected = run(shut_model(config), SPARSE_KIND), run(shut_model(), SPARSE_KIND)
    assert len(projected) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_weights_that_torch_does_not_count_are_looked_at_with_new_records(
    projected: list[CompressionGate],
) -> None:
    """As where averaged weights are copied into a model for inference."""
    model = shut_model()
    run(model, SPARSE_KIND)
    for gate in gates(model):
        gate.weight.data.fill_(1.0)
    run(model, SPARSE_KIND)
    assert projected == gates(model)


def test_a_gate_that_is_never_shut_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sparse_model(gate_compress=True)
    look_at_gates(model)
    monkeypatch.setattr(CompressionGate, "look", None)
    run(model, SPARSE_KIND)


def test_a_compiled_model_does_not_keep_a_gate_shut() -> None:
    """Its graph asks nothing at later calls, so it would not see that weights change in place."""
    model = shut_model()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    records = model.attention_records(SPARSE_KIND.layout)
    prepare_attention(model, records, model.config.attention_lengths(SPARSE_KIND.rows, SPARSE_KIND.text))
    inputs = build_inputs(SPARSE_KIND, batch=1)
    with torch.no_grad():
        compiled(**inputs, attention_records=records)
        for gate in gates(model):
            gate.weight.add_(0.5)
        found = compiled(**inputs, attention_records=records)
    for one, other in zip(found, run(model, SPARSE_KIND), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_what_wraps_a_shut_gate_has_its_say() -> None:
    """As a low-rank adapter in training does, which puts a module of its own in the gate's place."""
    model, expected = shut_model(), sparse_model(gate_compress=True)

    class Wrapped(torch.nn.Module):
        def __init__(self, base: CompressionGate, added: torch.Tensor) -> None:
            super().__init__()
            self.base, self.added = base, added

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.base(rows) + rows @ self.added.T

    for block, gate in zip(model.transformer_blocks, gates(expected), strict=True):
        block.attn.to_gate_compress = Wrapped(block.attn.to_gate_compress, gate.weight)
    for one, other in zip(run(model, SPARSE_KIND), run(expected, SPARSE_KIND), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_shut_gate_is_held_for_open_where_tensors_are_fake() -> None:
    model = shut_model()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.attention_records(SPARSE_KIND.layout)
    assert not any(gate._is_shut for gate in gates(model))
