"""`run` with checkpoint folders that are broken: one text that names the file, before any step was taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from omni_attn.config import PipelineConfig
from omni_attn.errors import ConfigError
from omni_attn.models.runtime import no_progress
from omni_attn.models.wan.family import run
from tests.models.wan.tiny_checkpoints import build_pipeline

SIZE = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 1}


def configure(folder: Path, **generation: Any) -> PipelineConfig:
    values = {"pipeline": "wan", "model": str(folder), "device": "cpu", "output": str(folder / "out")}
    return PipelineConfig.model_validate(values | {"generation": SIZE | generation})


def refuse_steps(items: Any, total: int, description: str) -> Any:
    pytest.fail("a step was taken")


def delete(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).unlink()


def overwrite(path: str) -> Callable[[Path], object]:
    return lambda folder: (folder / path).write_bytes(b"x" * 20)


def put(path: str, **values: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / path
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


VAE_WEIGHTS = "vae/diffusion_pytorch_model.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no VAE weights": (delete(VAE_WEIGHTS), "vae cannot be loaded: .*no file named"),
    "VAE weights cut short": (overwrite(VAE_WEIGHTS), f"{VAE_WEIGHTS} is not a whole safetensors file"),
    "a VAE of other shapes": (put("vae/config.json", base_dim=16), "vae cannot be loaded: .*expected shape"),
    "another VAE class": (put("vae/config.json", _class_name="AutoencoderKL"), "is 'AutoencoderKL', and"),
    "a VAE factor of text": (put("vae/config.json", scale_factor_spatial="8"), "must be positive integers"),
    "no text encoder weights": (
        delete("text_encoder/model.safetensors"),
        "text_encoder cannot be loaded: .*no file named",
    ),
    "a text encoder of other shapes": (
        put("text_encoder/config.json", d_model=16),
        "text_encoder cannot be loaded: .*mismatched",
    ),
    "no tokenizer": (delete("tokenizer/tokenizer.json"), "tokenizer cannot be loaded: "),
    "a scheduler that refuses its options": (
        put("scheduler/scheduler_config.json", beta_schedule="unheard_of"),
        "scheduler cannot be loaded: unheard_of is not implemented",
    ),
    "a boundary of text": (
        put("model_index.json", boundary_ratio="0.8"),
        "boundary_ratio is '0.8', and must be",
    ),
    "a boundary in steps": (
        put("model_index.json", boundary_ratio=800),
        "boundary_ratio is 800, and must be",
    ),
}


@pytest.mark.parametrize(("spoil", "text"), BROKEN.values(), ids=BROKEN)
def test_a_broken_folder_is_refused_before_the_first_step(
    tmp_path: Path, spoil: Callable[[Path], object], text: str
) -> None:
    build_pipeline("two_experts", with_text=True, with_vae=True).save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=text) as error:
        run(configure(tmp_path), progress=refuse_steps)
    assert str(tmp_path) in str(error.value)


def test_a_vae_of_another_model(tmp_path: Path) -> None:
    pipeline = build_pipeline("t2v", with_vae=True)
    pipeline.vae = type(pipeline.vae).from_config(
        dict(pipeline.vae.config) | {"z_dim": 6, "latents_mean": [0.0] * 6, "latents_std": [1.0] * 6}
    )
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="latents of this VAE have 6 channels, those of the transformer 4"):
        run(configure(tmp_path), progress=refuse_steps)


@pytest.mark.parametrize(
    ("embeds", "text"),
    [
        (torch.ones(1, 5, 32, dtype=torch.int64), "prompt_embeds in .* is torch.int64"),
        (torch.full((1, 5, 32), torch.nan), "prompt_embeds in .* holds NaN or infinity"),
    ],
)
def test_embeddings_that_no_encoder_gives(tmp_path: Path, embeds: torch.Tensor, text: str) -> None:
    save_file({"prompt_embeds": embeds}, tmp_path / "prompt.safetensors")
    build_pipeline("t2v").save_pretrained(tmp_path / "checkpoint")
    config = configure(tmp_path / "checkpoint", prompt_embeds=str(tmp_path / "prompt.safetensors"))
    with pytest.raises(ConfigError, match=text):
        run(config, progress=refuse_steps)


def test_the_folder_that_these_spoil_is_good(tmp_path: Path) -> None:
    build_pipeline("two_experts", with_text=True, with_vae=True).save_pretrained(tmp_path)
    assert (tmp_path / "out" / "frame_0004.png") in run(configure(tmp_path), progress=no_progress).files
