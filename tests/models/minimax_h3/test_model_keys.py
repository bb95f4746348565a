"""Names and shapes of the real transformer's weights are diffusers', seen on the meta device."""

from __future__ import annotations

import torch
from diffusers import MiniMaxH3Transformer3DModel
from torch import nn

from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from tests.models.minimax_h3.tiny_models import REAL

CONFIG = MiniMaxH3Config(**REAL)


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def test_names_and_shapes_of_the_real_configuration() -> None:
    with torch.device("meta"):
        ours = MiniMaxH3Model(CONFIG)
        theirs = MiniMaxH3Transformer3DModel(**CONFIG.to_diffusers())
    assert shapes(ours) == shapes(theirs)
    assert all(parameter.is_meta for parameter in ours.parameters())
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in ours.named_children()}
    assert round(sizes["transformer_blocks"] / 1e9, 2) == 32.28
    assert round(sizes["token_refiner"] / 1e9, 2) == 0.77


def test_gates_are_one_weight_more_in_each_main_block() -> None:
    with torch.device("meta"):
        plain = shapes(MiniMaxH3Model(CONFIG))
        gated = shapes(MiniMaxH3Model(MiniMaxH3Config(**REAL, gate_compress=True)))
    added = {name: gated[name] for name in gated.keys() - plain.keys()}
    assert added == {
        f"transformer_blocks.{block}.attn.to_gate_compress.weight": (7168, 5376) for block in range(50)
    }
    assert round(sum(shape.numel() for shape in added.values()) / 1e9, 2) == 1.93


def test_factorised_modulation_has_a_basis_and_narrow_projections() -> None:
    with torch.device("meta"):
        found = shapes(MiniMaxH3Model(MiniMaxH3Config(**REAL, adaln_rank=16)))
    assert found["adaln_basis.weight"] == (16, 2688)
    assert found["transformer_blocks.49.adaln_proj.linear.weight"] == (96768, 16)
    assert found["norm_out.linear.weight"] == (10752, 16)
