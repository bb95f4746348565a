"""A folder as diffusers writes it becomes the same model, with gates and adapters where they are there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from omni_attn.errors import ConfigError
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.selector import use_attention_config
from tests.models.minimax_h3.sparse_models import SPARSE, SPARSE_KIND, run
from tests.models.minimax_h3.tiny_models import build_inputs, build_reference, config_of

GATE = "transformer_blocks.{}.attn.to_gate_compress.weight"
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_reference().save_pretrained(tmp_path)
    return tmp_path


def add_weights(folder: Path, added: dict[str, torch.Tensor]) -> None:
    save_file(load_file(folder / FILE) | added, folder / FILE)


def adapter_file(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / "adapter_model.safetensors"
    save_file(tensors, path, metadata={"format": "fastvideo-lora-v2"})
    return path


@pytest.mark.parametrize("shards", [False, True])
def test_the_same_model(tmp_path: Path, shards: bool) -> None:
    reference = build_reference()
    reference.save_pretrained(tmp_path, **({"max_shard_size": "100KB"} if shards else {}))
    model = MiniMaxH3Model.from_pretrained(tmp_path)
    assert model.config == config_of() and not model.training and model.dtype == torch.float32
    inputs = build_inputs()
    with torch.no_grad():
        for one, other in zip(model(**inputs), reference(**inputs, return_dict=False), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_mixed_precision_is_that_of_the_published_model(folder: Path) -> None:
    model = MiniMaxH3Model.from_pretrained(folder, dtype="bfloat16")
    wide = {name.partition(".")[0] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {"proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out"}
    assert model.dtype == torch.bfloat16 and model.device == torch.device("cpu")
    assert {layer.request.dtype for layer in model.modules() if hasattr(layer, "request")} == {"bfloat16"}


def test_gates_are_there_where_the_weights_have_them(folder: Path) -> None:
    shape = (64, 48)
    add_weights(folder, {GATE.format(0): torch.zeros(shape), GATE.format(1): torch.ones(shape)})
    with use_attention_config(SPARSE, device="cpu"):
        model = MiniMaxH3Model.from_pretrained(folder)
    assert model.config.gate_compress
    assert [block.attn.to_gate_compress._is_shut for block in model.transformer_blocks] == [True, False]
    assert run(model, SPARSE_KIND)[0].isfinite().all()


def test_gates_in_part_are_refused(folder: Path) -> None:
    add_weights(folder, {GATE.format(0): torch.zeros(64, 48)})
    with pytest.raises(ConfigError, match=r"of 2 weights 1 are missing: transformer_blocks\.1"):
        MiniMaxH3Model.from_pretrained(folder)


def test_a_quantised_checkpoint_is_told_as_such(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(values | {"quantization_config": {"quant_method": "fp8"}, "other": 1})
    )
    with pytest.raises(ConfigError, match=r"quantization_config .method fp8"):
        MiniMaxH3Model.from_pretrained(folder)


def test_an_adapter_is_fused_and_may_bring_gates(folder: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    name = "transformer_blocks.1.attn.to_q"
    low, high = torch.randn(3, 48, generator=generator), torch.randn(64, 3, generator=generator)
    gate = torch.randn(64, 48, generator=generator)
    tensors = {f"{name}.lora_A.weight": low, f"{name}.lora_B.weight": high}
    tensors |= {GATE.format(i).replace(".weight", ".set_weight"): gate * i for i in range(2)}
    plain = MiniMaxH3Model.from_pretrained(folder).state_dict()
    fused = MiniMaxH3Model.from_pretrained(folder, adapter=adapter_file(folder, tensors))
    state = fused.state_dict()
    torch.testing.assert_close(state[f"{name}.weight"], plain[f"{name}.weight"] + high @ low)
    assert torch.equal(state[GATE.format(1)], gate)
    assert [block.attn.to_gate_compress._is_shut for block in fused.transformer_blocks] == [True, False]
    changed = {f"{name}.weight", GATE.format(0), GATE.format(1)}
    assert all(torch.equal(state[key], plain[key]) for key in state.keys() - changed)
