"""Gates of video sparse attention, whatever model they belong to."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from omni_attn.models.gates import has_gates, is_gate, unread_gates_note
from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.models.wan.model import WanModel
from omni_attn.selector import use_attention_config
from tests.models.minimax_h3 import tiny_models as minimax_h3
from tests.models.wan import tiny_models as wan


def build(family: str, backend: str, has_gates: bool) -> nn.Module:
    with use_attention_config({"per_role": {"self": backend}}, device="cpu"):
        if family == "wan":
            return WanModel(dataclasses.replace(wan.config_of("t2v"), gate_compress=has_gates))
        return MiniMaxH3Model(MiniMaxH3Config(**minimax_h3.BASE, gate_compress=has_gates))


@pytest.mark.parametrize("family", ["wan", "minimax_h3"])
def test_a_note_says_which_backend_leaves_gates_out(family: str) -> None:
    """Two layers with gates in both models; refiner and cross-attention have none and do not count."""
    (note,) = unread_gates_note(build(family, "TORCH_SDPA", has_gates=True))
    assert note.startswith("gates: 2 of 2 layers leave out to_gate_compress, which TORCH_SDPA does not read")
    assert unread_gates_note(build(family, "FASTVIDEO_VSA", has_gates=True)) == ()
    assert unread_gates_note(build(family, "TORCH_SDPA", has_gates=False)) == ()


def test_gates_are_known_by_name_in_any_spelling() -> None:
    assert is_gate("blocks.0.to_gate_compress.bias") and is_gate(
        "transformer_blocks.1.attn.to_gate_compress.weight"
    )
    assert not is_gate("blocks.0.ffn.net.0.proj.weight")
    assert has_gates(["a", "blocks.0.to_gate_compress.weight"]) and not has_gates(["a"])
