"""Checkpoints of kinds that are not read here are refused by name, before a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from omni_attn.errors import ConfigError
from omni_attn.models.checkpoint import stored_header
from omni_attn.models.minimax_h3.quantised import check_supported
from tests.models.minimax_h3.tiny_models import BASE
from tests.models.minimax_h3.tiny_weights import build_reference

QKV = "blocks.0.attn.qkv_proj"
WEIGHT, SCALE = f"{QKV}.weight", f"{QKV}.weight_scale"
ONE = torch.ones(1)
FP8 = torch.zeros(4, 4).to(torch.float8_e4m3fn)
BYTES = torch.zeros(4, dtype=torch.uint8)

# Kind -> what the file holds, and how the text begins behind the folder's name.
KINDS: dict[str, tuple[dict[str, Tensor], str]] = {
    "fp8": (
        {WEIGHT: FP8, SCALE: ONE},
        f"fp8 weights, which are not read here: {WEIGHT} (F8_E4M3), {SCALE} (F32).",
    ),
    "fp8 without scales": ({WEIGHT: FP8}, "fp8 weights"),
    "fp8 for ComfyUI": ({WEIGHT: FP8, "scaled_fp8": FP8.clone()}, "fp8 weights"),
    "mxfp8": ({WEIGHT: FP8, SCALE: FP8.to(torch.float8_e8m0fnu)}, "mxfp8 weights"),
    "mxfp8 with scales as bytes": ({WEIGHT: FP8, SCALE: BYTES}, "mxfp8 weights"),
    "nvfp4": ({WEIGHT: BYTES, SCALE: FP8, f"{SCALE}_2": ONE}, "nvfp4 weights"),
    "int8": ({WEIGHT: BYTES.to(torch.int8), SCALE: ONE}, "int8 weights"),
    "four bits": ({WEIGHT: BYTES, f"{WEIGHT}.absmax": ONE}, "quantised weights"),
    "mark alone": (
        {WEIGHT: ONE, f"{QKV}.comfy_quant": BYTES},
        f"quantised weights, which are not read here: {QKV}.comfy_quant (U8).",
    ),
    "curves": ({"adaln_t_table": ONE}, "adaln_t_table: modulation is looked up in a table"),
    "curves by another name": (
        {"time_embedder.table": ONE, "norm_out.folded_bias": ONE.clone()},
        "norm_out.folded_bias, time_embedder.table: modulation is looked up",
    ),
    "wrapped": (
        {f"model.diffusion_model.{WEIGHT}": ONE},
        f"model.diffusion_model.{WEIGHT}: names of a single-file export",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_named(kind: str, tmp_path: Path) -> None:
    tensors, text = KINDS[kind]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=str(tmp_path)) as caught:
        check_supported(tmp_path, BASE, stored_header(tmp_path, "model"))
    assert caught.value.problems[0].startswith(f"{tmp_path}: {text}")
    assert "nothing was loaded. Use the checkpoint in bfloat16" in caught.value.problems[-1]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            r"quantization_config \(method bitsandbytes\)",
        ),
        ({"quantization_config": {"quant_type": "nvfp4"}}, "method nvfp4"),
        ({"quantization_config": {}}, "method not named"),
        ({"quantization_config": "fp8"}, "method fp8"),
        ({"pdd_steps": 32}, "pdd_steps 32: a student with that many output heads"),
    ],
)
def test_config_may_say_so(values: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        check_supported(tmp_path, BASE | values, {})


def test_all_findings_come_together(tmp_path: Path) -> None:
    header = {
        "model.diffusion_model.adaln_t_table": {"dtype": "F32"},
        "model.diffusion_model.x.weight": {"dtype": "F8_E5M2"},
    }
    with pytest.raises(ConfigError) as caught:
        check_supported(tmp_path, {"quantization_config": {"quant_method": "fp8"}}, header)
    assert len(caught.value.problems) == 5


def test_gguf_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "h3-Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"GGUF files, which are not read here: h3-Q4\.gguf"):
        check_supported(tmp_path, BASE, stored_header(tmp_path, "model"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_plain_weights_pass(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: tensor.to(dtype) for name, tensor in build_reference().state_dict().items()}
    state["adaln_basis.weight"] = torch.ones(4, 32, dtype=torch.float16)
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    header = stored_header(tmp_path, "diffusion_pytorch_model")
    assert header.keys() == state.keys()
    check_supported(tmp_path, BASE | {"adaln_rank": 4, "quantization_config": None}, header)
