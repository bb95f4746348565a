"""Folders of both releases load as whole models, with an adapter fused, or are refused whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.models.minimax_h3.loading import keeps_float32
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from tests.models.minimax_h3.tiny_models import BASE
from tests.models.minimax_h3.tiny_weights import (
    HIDDEN,
    INNER,
    LAYERS,
    NATIVE_VALUES,
    assert_same_weights,
    build_reference,
    gates,
    to_native,
)


def write(folder: Path, state: dict[str, Tensor], values: dict[str, Any], stem: str) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / f"{stem}.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A transformer's folder of the first release."""
    return write(tmp_path / "transformer", to_native(build_reference().state_dict()), NATIVE_VALUES, "model")


def adapter(folder: Path) -> Path:
    """What a gated student changes: a norm, a head's bias, a low-rank product; and its gates."""
    path = folder / "adapter_model.safetensors"
    tensors = {name.replace(".weight", ".set_weight"): gate for name, gate in gates().items()} | {
        "transformer_blocks.0.norm1.diff": torch.ones(HIDDEN),
        "proj_out.diff_b": torch.full((24,), 0.5),
        "transformer_blocks.1.attn.to_v.lora_A.weight": torch.eye(1, HIDDEN),
        "transformer_blocks.1.attn.to_v.lora_B.weight": torch.full((INNER, 1), 2.0),
    }
    save_file(tensors, path, metadata={"format": "fastvideo-lora-v2"})
    return path


def test_the_first_release_loads_as_diffusers_has_it(native: Path) -> None:
    model = MiniMaxH3Model.from_pretrained(native)
    assert not model.training
    assert_same_weights(dict(model.state_dict()), dict(build_reference().state_dict()))


def test_an_adapter_makes_the_student(native: Path, tmp_path: Path) -> None:
    model = MiniMaxH3Model.from_pretrained(native, adapter=adapter(tmp_path))
    assert model.config.gate_compress
    expected = dict(build_reference().state_dict()) | gates()
    expected["transformer_blocks.0.norm1.weight"] = (
        expected["transformer_blocks.0.norm1.weight"].float() + 1
    ).bfloat16()
    expected["proj_out.bias"] = expected["proj_out.bias"] + 0.5
    projection = expected["transformer_blocks.1.attn.to_v.weight"].float()
    projection[:, 0] += 2
    expected["transformer_blocks.1.attn.to_v.weight"] = projection.bfloat16()
    assert_same_weights(dict(model.state_dict()), expected)


def test_another_dtype_is_cast_to_behind_the_fusion(native: Path, tmp_path: Path) -> None:
    stored = MiniMaxH3Model.from_pretrained(native, adapter=adapter(tmp_path))
    model = MiniMaxH3Model.from_pretrained(native, adapter=adapter(tmp_path), dtype="float16")
    expected = {
        name: weight.float() if keeps_float32(name) else weight.half()
        for name, weight in stored.state_dict().items()
    }
    assert_same_weights(dict(model.state_dict()), expected)


def test_factorised_modulation_stays_exact(tmp_path: Path) -> None:
    rank = 4
    state = dict(build_reference().state_dict()) | {
        "adaln_basis.weight": torch.randn(rank, 32).half(),
        "norm_out.linear.weight": torch.randn(2 * HIDDEN, rank).half(),
    }
    for block in range(LAYERS):
        state[f"transformer_blocks.{block}.adaln_proj.linear.weight"] = torch.randn(18 * HIDDEN, rank).half()
    folder = write(tmp_path / "pruned", state, BASE | {"adaln_rank": rank}, "diffusion_pytorch_model")
    model = MiniMaxH3Model.from_pretrained(folder, dtype="bfloat16")
    for name, weight in model.state_dict().items():
        is_exact = keeps_float32(name, is_factorised=True)
        assert weight.dtype == (torch.float32 if is_exact else torch.bfloat16), name
        assert torch.equal(weight.double(), state[name].double()), name
    with pytest.raises(ConfigError, match=r"unexpected weights: adaln_basis\.weight"):
        MiniMaxH3Model.from_pretrained(write(folder, state, BASE, "diffusion_pytorch_model"))


def test_a_quantised_folder_is_refused_before_its_config_is_judged(native: Path) -> None:
    values = NATIVE_VALUES | {"quantization_config": {"quant_method": "nvfp4"}}
    (native / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"quantization_config \(method nvfp4\)"):
        MiniMaxH3Model.from_pretrained(native)


def test_a_surplus_weight_is_refused(tmp_path: Path) -> None:
    state = dict(build_reference().state_dict()) | {"rope.scale": torch.ones(1)}
    folder = write(tmp_path / "surplus", state, BASE, "diffusion_pytorch_model")
    with pytest.raises(ConfigError, match=r"1 unexpected weights: rope\.scale"):
        MiniMaxH3Model.from_pretrained(folder)
