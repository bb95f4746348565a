"""Names and layouts of other repositories become the model's; what fits nowhere is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_minimax_h3_transformer_checkpoint_to_diffusers
from safetensors.torch import save_file
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.models.gates import has_gates
from omni_attn.models.minimax_h3.config import MiniMaxH3Config
from omni_attn.models.minimax_h3.loading import (
    check_gates,
    convert_config,
    convert_state_dict,
    keeps_float32,
    read_weights,
    weights_stem,
)
from tests.models.minimax_h3.tiny_models import BASE
from tests.models.minimax_h3.tiny_weights import (
    CONFIG,
    FFN,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    NATIVE_VALUES,
    assert_same_weights,
    build_reference,
    gates,
    to_native,
)


def contiguous(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in state.items()}


def test_native_weights_become_those_of_diffusers() -> None:
    expected = build_reference().state_dict()
    native = to_native(expected)
    assert len(native) < len(expected) and not native.keys() & {
        name for name in expected if "blocks" in name and ".norm" not in name
    }
    assert_same_weights(convert_state_dict(native, CONFIG), expected)


def test_native_weights_convert_as_diffusers_converts_them() -> None:
    native = to_native(build_reference().state_dict())
    theirs = convert_minimax_h3_transformer_checkpoint_to_diffusers(
        dict(native), config=BASE, qkv_layout="interleaved"
    )
    assert_same_weights(convert_state_dict(native, CONFIG), theirs)


def test_names_of_diffusers_pass_as_they_are() -> None:
    state = build_reference().state_dict() | gates()
    converted = convert_state_dict(state, CONFIG)
    assert_same_weights(converted, state)
    assert all(converted[name] is tensor for name, tensor in state.items())


def test_gates_beside_native_names() -> None:
    native = {name.replace("transformer_blocks", "blocks"): gate for name, gate in gates().items()}
    assert_same_weights(convert_state_dict(native, CONFIG), gates())


def test_projections_that_diffusers_fused() -> None:
    reference = build_reference()
    expected = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    for module in reference.modules():
        if hasattr(module, "fuse_projections") and hasattr(module, "to_q"):
            with torch.no_grad():
                module.fuse_projections()
    state = reference.state_dict()
    assert len(state) == len(expected) + 4
    assert_same_weights(convert_state_dict(state, CONFIG), expected)
    del state["transformer_blocks.0.attn.to_k.weight"]
    assert_same_weights(convert_state_dict(state, CONFIG), expected)


@pytest.mark.parametrize("native", [True, False], ids=["two spellings", "fused beside its parts"])
def test_two_values_for_one_weight_are_refused(native: bool) -> None:
    name = "transformer_blocks.0.attn.to_k.weight"
    key = "blocks.0.attn.qkv_proj.weight" if native else "transformer_blocks.0.attn.to_qkv.weight"
    state = {name: torch.ones(HEADS * HEAD_SIZE, 3), key: torch.zeros(3 * HEADS * HEAD_SIZE, 3)}
    with pytest.raises(ConfigError, match=re.escape(f"give {name} different values, the second is {key}")):
        convert_state_dict(state, CONFIG)


@pytest.mark.parametrize(
    ("key", "rows", "text"),
    [
        ("blocks.1.attn.qkv_proj.weight", 96, r"has 96 rows, .* needs 192 = 3 x 2 heads x 32"),
        ("token_refiner.blocks.0.attn.qkv_proj.weight", 191, "has 191 rows, .* needs 192"),
        ("transformer_blocks.1.attn.to_qkv.weight", 96, "has 96 rows, .* needs 192"),
        ("blocks.1.mlp.fc1.weight", 128, r"has 128 rows, .* needs 160 = 2 x ffn_dim 80"),
    ],
)
def test_rows_of_another_model_are_refused(key: str, rows: int, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(key)} {text}"):
        convert_state_dict({key: torch.zeros(rows, HIDDEN)}, CONFIG)
    with pytest.raises(ConfigError, match=f"{re.escape(key)} has 0 rows"):
        convert_state_dict({key: torch.tensor(1.0)}, CONFIG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_are_dropped_if_the_model_computes_the_same(dtype: torch.dtype) -> None:
    frequencies = 10000.0 ** -(torch.arange(4) / 4)
    assert convert_state_dict({"rope.inv_freq": frequencies.to(dtype)}, CONFIG) == {}


@pytest.mark.parametrize(
    "frequencies",
    [500.0 ** -(torch.arange(4) / 4), 10000.0 ** -(torch.arange(16) / 16)],
    ids=["theta", "number"],
)
def test_other_frequencies_are_refused(frequencies: Tensor) -> None:
    text = f"holds {len(frequencies)} numbers that are not the 4 frequencies of rope_theta 10000.0"
    with pytest.raises(ConfigError, match=text):
        convert_state_dict({"rope.inv_freq": frequencies}, CONFIG)


def test_the_float32_parts_are_those_of_the_published_checkpoints() -> None:
    reference = build_reference()
    modules = set(type(reference)._keep_in_fp32_modules)
    for name, parameter in reference.named_parameters():
        assert keeps_float32(name) == any(module in name for module in modules), name
        assert keeps_float32(name) == (parameter.dtype == torch.float32), name


def test_factorised_modulation_is_kept_exact() -> None:
    factorised = {
        "adaln_basis.weight",
        "norm_out.linear.bias",
        "transformer_blocks.1.adaln_proj.linear.weight",
    }
    others = {"norm_out.norm.weight", "transformer_blocks.1.attn.to_q.weight", "context_embedder.bias"}
    assert all(keeps_float32(name, is_factorised=True) for name in factorised)
    assert not any(keeps_float32(name, is_factorised=True) for name in others)
    assert not any(keeps_float32(name) for name in factorised | others)


def test_gates_are_in_all_blocks_or_in_none() -> None:
    names = list(gates())
    assert has_gates(names)
    check_gates(CONFIG, names, "here")
    check_gates(CONFIG, ["proj_in.weight"], "here")
    with pytest.raises(
        ConfigError, match=rf"here: .* of 2 weights 1 are missing: {re.escape(names[1])}\..* 2 blocks"
    ):
        check_gates(CONFIG, names[:1], "here")


def test_config_of_the_first_release() -> None:
    assert MiniMaxH3Config.from_dict(convert_config(NATIVE_VALUES)) == CONFIG
    named = NATIVE_VALUES | {"_class_name": "AnotherName"}
    assert MiniMaxH3Config.from_dict(convert_config(named)) == CONFIG
    assert convert_config(BASE | {"_class_name": "Kept"}) == BASE | {"_class_name": "Kept"}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"ffn_dim": 80}, "ffn_hidden_size and ffn_dim name one thing"),
        ({"adaln_out_features": 64}, "adaln_out_features is 64, and hidden_size 48 needs 864"),
    ],
)
def test_contradictory_configs_are_refused(more: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=f"there: {text}"):
        convert_config(NATIVE_VALUES | more, source="there")


@pytest.mark.parametrize("kind", ["diffusers", "diffusers in shards", "native", "native in shards"])
def test_folders_of_both_kinds_are_read(kind: str, tmp_path: Path) -> None:
    reference = build_reference()
    expected = reference.state_dict()
    if kind.startswith("diffusers"):
        reference.save_pretrained(tmp_path, max_shard_size="100KB" if "shards" in kind else "10GB")
    else:
        native = contiguous(to_native(expected))
        names = sorted(native)
        parts = [names[::2], names[1::2]] if "shards" in kind else [names]
        files = ["model.safetensors"] if len(parts) == 1 else ["a.safetensors", "b.safetensors"]
        for file, part in zip(files, parts, strict=True):
            save_file({name: native[name] for name in part}, tmp_path / file)
        if len(parts) == 2:
            weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    stem = "diffusion_pytorch_model" if kind.startswith("diffusers") else "model"
    assert weights_stem(tmp_path) == stem
    assert (tmp_path / f"{stem}.safetensors").is_file() == ("shards" not in kind)
    state, finish = read_weights(tmp_path, CONFIG)
    assert finish is None
    assert_same_weights(state, expected)


def test_a_folder_without_weights_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither diffusion_pytorch_model\.safetensors nor"):
        read_weights(tmp_path, CONFIG)


def test_gates_in_part_are_refused_when_a_folder_is_read(tmp_path: Path) -> None:
    state = build_reference().state_dict() | gates()
    del state["transformer_blocks.0.attn.to_gate_compress.weight"]
    save_file(contiguous(state), tmp_path / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ConfigError, match=r"of 2 weights 1 are missing: transformer_blocks\.0\."):
        read_weights(tmp_path, CONFIG)


def test_a_bigger_model_has_other_rows(tmp_path: Path) -> None:
    save_file(contiguous(to_native(build_reference().state_dict())), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"needs {2 * 3 * FFN}"):
        read_weights(tmp_path, dataclasses.replace(CONFIG, ffn_dim=3 * FFN))
