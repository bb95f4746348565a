"""Checkpoint folders load whole or are refused whole; names of other repositories are understood."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.layer import Attention
from omni_attn.models.wan.loading import convert_state_dict, keeps_float32
from omni_attn.models.wan.model import WanModel
from omni_attn.selector import use_attention_config
from tests.models.wan.tiny_models import KINDS, build_inputs, build_reference

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An image-conditioned model with every kind of weight, as diffusers saves it."""
    build_reference("flf2v").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    state = load_file(folder / WEIGHTS)
    state = {name: tensor.clone() for name, tensor in state.items()}
    change(state)
    (folder / WEIGHTS).unlink()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / WEIGHTS)


def assert_same_weights(model: WanModel, expected: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("shard_size", ["10GB", "20KB"])
@pytest.mark.parametrize("kind", KINDS)
def test_loads_what_diffusers_saves(kind: str, shard_size: str, tmp_path: Path) -> None:
    reference = build_reference(kind)
    reference.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / f"{WEIGHTS}.index.json").is_file() == (shard_size == "20KB")
    model = WanModel.from_pretrained(tmp_path)
    assert not model.training
    assert_same_weights(model, reference.state_dict())
    inputs = build_inputs(kind)
    with torch.no_grad():
        theirs = reference(*inputs, return_dict=False)[0]
        torch.testing.assert_close(model(*inputs), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_a_dtype_leaves_what_must_be_float32(dtype: torch.dtype | str, folder: Path) -> None:
    model = WanModel.from_pretrained(str(folder), device="cpu", dtype=dtype)
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cpu"
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if keeps_float32(name) else torch.bfloat16), name


def test_without_a_dtype_weights_stay_as_stored(folder: Path) -> None:
    rewrite(folder, lambda state: state.update({name: tensor.half() for name, tensor in state.items()}))
    model = WanModel.from_pretrained(folder)
    assert {parameter.dtype for name, parameter in model.named_parameters() if not keeps_float32(name)} == {
        torch.float16
    }
    assert {parameter.dtype for name, parameter in model.named_parameters() if keeps_float32(name)} == {
        torch.float32
    }


def test_backends_are_selected_for_what_is_loaded(folder: Path) -> None:
    with use_attention_config("TORCH_SDPA", device="cpu", dtype="float16", lengths={"self": (18, 18)}):
        model = WanModel.from_pretrained(folder, device="cpu", dtype="bfloat16")
    requests = {layer.request for layer in model.modules() if isinstance(layer, Attention)}
    assert {request.dtype for request in requests} == {"bfloat16"}
    assert {request.max_seqlen_k for request in requests if request.role == "self"} == {18}


def test_loading_leaves_the_random_state_alone(folder: Path) -> None:
    before = torch.random.get_rng_state()
    WanModel.from_pretrained(folder)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("proj_out.bias"), r"1 missing weights: proj_out\.bias"),
        (
            lambda state: [state.pop(name) for name in list(state) if ".attn1." in name],
            r"20 missing weights: blocks\.0\.attn1\.to_q\.weight, .* and 15 more",
        ),
        (lambda state: state.update(extra=torch.zeros(2)), "1 unexpected weights: extra"),
        (
            lambda state: state.update({"proj_out.bias": torch.zeros(3)}),
            r"1 weights of another shape: proj_out\.bias is \[3\], needs \[16\]",
        ),
        (
            lambda state: state.update({"proj_out.weight": torch.zeros(16, 24, dtype=torch.int8)}),
            r"1 weights of a dtype that is not supported: proj_out\.weight is torch\.int8",
        ),
    ],
)
def test_refuses_weights_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], object], text: str, folder: Path
) -> None:
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=text) as caught:
        WanModel.from_pretrained(folder)
    assert "nothing was loaded" in caught.value.problems[-1]


def test_all_kinds_of_misfit_come_together(folder: Path) -> None:
    def change(state: dict[str, Tensor]) -> None:
        state["surplus"] = state.pop("proj_out.bias")
        state["proj_out.weight"] = torch.zeros(1)

    rewrite(folder, change)
    with pytest.raises(ConfigError) as caught:
        WanModel.from_pretrained(folder)
    assert len(caught.value.problems) == 4


def test_the_one_unused_norm_is_ignored_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(folder, lambda state: state.update({"blocks.0.attn2.norm_added_q.weight": torch.ones(24)}))
    with caplog.at_level(logging.WARNING, logger="omni_attn"):
        WanModel.from_pretrained(folder)
    assert "ignored weights that no layer uses: blocks.0.attn2.norm_added_q.weight" in caplog.text


def test_names_of_diffusers_pass_unchanged() -> None:
    state = build_reference("flf2v").state_dict()
    converted = convert_state_dict(state)
    assert list(converted) == list(state)
    assert all(converted[name] is tensor for name, tensor in state.items())


# From diffusers' names to another repository's, written the other way round than the loader's map.
ORIGINAL = [
    (r"^condition_embedder\.time_embedder\.linear_(\d)", lambda m: f"time_embedding.{2 * int(m[1]) - 2}"),
    (r"^condition_embedder\.text_embedder\.linear_(\d)", lambda m: f"text_embedding.{2 * int(m[1]) - 2}"),
    (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
    (r"^condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
    (r"^proj_out", "head.head"),
    (r"^scale_shift_table", "head.modulation"),
    (r"^(blocks\.\d)\.scale_shift_table", r"\1.modulation"),
    (r"attn2\.add_(.)_proj", r"cross_attn.\1_img"),
    (r"attn2\.norm_added_k", "cross_attn.norm_k_img"),
    (r"\.to_out\.0", ".o"),
    (r"\.to_(.)\.", r".\1."),
    (r"attn1", "self_attn"),
    (r"attn2", "cross_attn"),
    (r"ffn\.net\.0\.proj", "ffn.0"),
    (r"ffn\.net\.2", "ffn.2"),
    (r"^(blocks\.\d)\.norm2", r"\1.norm3"),
]
FASTVIDEO = [
    (r"^patch_embedding", "patch_embedding.proj"),
    (r"text_embedder\.linear_1", "text_embedder.fc_in"),
    (r"text_embedder\.linear_2", "text_embedder.fc_out"),
    (r"time_embedder\.linear_1", "time_embedder.mlp.fc_in"),
    (r"time_embedder\.linear_2", "time_embedder.mlp.fc_out"),
    (r"time_proj", "time_modulation.linear"),
    (r"net\.0\.proj", "fc_in"),
    (r"net\.2", "fc_out"),
    (r"attn1\.", ""),
    (r"to_out\.0", "to_out"),
    (r"^(blocks\.\d)\.norm2", r"\1.self_attn_residual_norm.norm"),
]
Spelling = list[tuple[str, str | Callable[[re.Match[str]], str]]]


def respell(state: dict[str, Tensor], spelling: Spelling) -> dict[str, Tensor]:
    respelt = {}
    for name, tensor in state.items():
        for pattern, replacement in spelling:
            name = re.sub(pattern, replacement, name)
        respelt[name] = tensor
    return respelt


@pytest.mark.parametrize("spelling", [ORIGINAL, FASTVIDEO], ids=["original", "fastvideo"])
@pytest.mark.parametrize("kind", ["t2v", "flf2v"])
def test_names_of_other_repositories_load(kind: str, spelling: Spelling, tmp_path: Path) -> None:
    reference = build_reference(kind)
    reference.save_pretrained(tmp_path)
    state = reference.state_dict()
    respelt = respell(state, spelling)
    unchanged = respelt.keys() & state.keys()
    assert len(unchanged) < len(state) / 2
    save_file(respelt, tmp_path / WEIGHTS)
    assert_same_weights(WanModel.from_pretrained(tmp_path), state)


def test_fused_projections_are_split_by_rows(folder: Path) -> None:
    reference = build_reference("flf2v")
    expected = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    for block in reference.blocks:
        block.attn1.fuse_projections()
        block.attn2.fuse_projections()
    state = reference.state_dict()
    assert {"blocks.0.attn1.to_qkv.weight", "blocks.1.attn2.to_added_kv.bias"} <= state.keys()
    save_file(state, folder / WEIGHTS)  # both forms, as diffusers leaves them
    assert_same_weights(WanModel.from_pretrained(folder), expected)
    single = re.compile(r"attn1\.to_[qkv]\.|attn2\.(to_[kv]|add_[kv]_proj)\.")
    save_file({name: tensor for name, tensor in state.items() if not single.search(name)}, folder / WEIGHTS)
    assert_same_weights(WanModel.from_pretrained(folder), expected)


def test_two_values_for_one_weight_are_refused() -> None:
    fused = {"blocks.0.attn2.to_kv.weight": torch.ones(4, 2), "blocks.0.attn2.to_v.weight": torch.zeros(2, 2)}
    with pytest.raises(ConfigError, match=r"blocks\.0\.attn2\.to_v\.weight different values"):
        convert_state_dict(fused)


def test_rows_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ConfigError, match="7 rows, which 3 projections cannot share"):
        convert_state_dict({"blocks.0.attn1.to_qkv.bias": torch.ones(7)})


def test_folders_that_hold_no_transformer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        WanModel.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="Give the folder of one transformer"):
        WanModel.from_pretrained(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a whole pipeline: give .*transformer"):
        WanModel.from_pretrained(tmp_path)


def test_broken_files(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(ConfigError, match=r"weights found there: diffusion_pytorch_model\.fp16\.safetensors"):
        WanModel.from_pretrained(folder)
    (folder / WEIGHTS).write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"diffusion_pytorch_model\.safetensors cannot be read"):
        WanModel.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        WanModel.from_pretrained(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a JSON list"):
        WanModel.from_pretrained(folder)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    build_reference("t2v").save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / f"{WEIGHTS}.index.json").read_text())
    shard = max(index["weight_map"].values())
    (tmp_path / shard).unlink()
    with pytest.raises(ConfigError, match=f"names shards that are not there: {re.escape(shard)}"):
        WanModel.from_pretrained(tmp_path)


def test_a_dtype_that_weights_cannot_have(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype 'int8' is not one that weights can have"):
        WanModel.from_pretrained(folder, dtype="int8")
