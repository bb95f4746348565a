"""Tensors of one layer that travel with the record: handed over where facts name them, refused elsewhere."""

from __future__ import annotations

import pytest
import torch

from omni_attn import Attention, AttentionConfig, AttentionMetadata, use_attention_config
from omni_attn.config import load_config
from omni_attn.errors import MetadataError
from tests.layer.counting import counting_backend
from tests.layer.stands import HEAD_SIZE, Stand, every_stand, tensors

GATE = frozenset({"gate_compress"})


def build(backend: str) -> Attention:
    with use_attention_config(AttentionConfig(default=backend), device="cpu"):
        return Attention(4, HEAD_SIZE, role="self")


def test_a_named_input_reaches_the_impl() -> None:
    gate = torch.ones(1, 3, 4, HEAD_SIZE)
    with counting_backend("GATED", layer_inputs=GATE) as tally:
        layer = build("GATED")
        assert layer.reads("gate_compress") and not layer.reads("gate_other")
        record = AttentionMetadata()
        gated = record.with_layer_inputs(gate_compress=gate)
        for given in (record, gated, record, gated):
            layer(*tensors(1, 3, 3), given)
    assert [list(inputs) for inputs in tally.inputs] == [[], ["gate_compress"]] * 2
    assert tally.inputs[1]["gate_compress"] is gate and tally.inputs[3]["gate_compress"] is gate


@every_stand
def test_an_input_that_nobody_named_is_refused(stand: Stand) -> None:
    with stand.kernels() as log:
        layer = stand.layer(4, HEAD_SIZE)
        assert not layer.reads("gate_unknown")
        record = AttentionMetadata()
        query, key, value = stand.call(1, 3, 3)
        layer(query, key, value, record)
        ran = len(log)
        with pytest.raises(MetadataError) as raised:
            layer(query, key, value, record.with_layer_inputs(gate_unknown=torch.ones(1)))
        assert len(log) == ran
    for part in ('"self"', stand.name, "gate_unknown"):
        assert part in str(raised.value)


def test_inputs_of_one_layer_stay_its_own() -> None:
    base = AttentionMetadata()
    first, second = torch.zeros(1), torch.ones(1)
    one, two = base.with_layer_inputs(gate=first), base.with_layer_inputs(gate=second, other=first)
    assert base.layer_inputs == {} and one.layer_inputs == {"gate": first}
    assert two.layer_inputs == {"gate": second, "other": first}
    assert one.with_layer_inputs(other=second).layer_inputs == {"gate": first, "other": second}


def test_a_fallback_runs_without_the_input_that_only_the_choice_reads() -> None:
    """The model asked reads() and made the input; a step that the choice refuses must still run on the fallback."""
    config = load_config({"default": {"backend": "GATED", "fallback": ["DENSE"]}})
    with (
        counting_backend("GATED", layer_inputs=GATE, refuse=lambda record, lengths: True),
        counting_backend("DENSE") as dense,
        use_attention_config(config, device="cpu"),
    ):
        layer = Attention(4, HEAD_SIZE, role="self")
        assert layer.reads("gate_compress")
        layer(*tensors(1, 3, 3), AttentionMetadata().with_layer_inputs(gate_compress=torch.ones(1)))
    assert dense.inputs == [{}]


def test_the_choice_runs_without_the_input_that_only_a_fallback_reads() -> None:
    config = load_config({"default": {"backend": "DENSE", "fallback": ["GATED"]}})
    with (
        counting_backend("GATED", layer_inputs=GATE),
        counting_backend("DENSE") as dense,
        use_attention_config(config, device="cpu"),
    ):
        layer = Attention(4, HEAD_SIZE, role="self")
        inputs = {"gate_compress": torch.ones(1)} if layer.reads("gate_compress") else {}
        layer(*tensors(1, 3, 3), AttentionMetadata().with_layer_inputs(**inputs))
    assert dense.inputs == [{}]
