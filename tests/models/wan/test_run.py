"""`run` with a preset: what is written, what is seeded and said so, what is refused before anything is allocated."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from omni_attn.config import PipelineConfig
from omni_attn.errors import BackendRejectedError, ConfigError
from omni_attn.layer import Attention
from omni_attn.models import runtime
from omni_attn.models.wan import family, source
from omni_attn.models.wan.family import attention_lengths, build_meta_model, run
from omni_attn.models.wan.needs import weight_bytes
from omni_attn.models.wan.presets import WAN_PRESETS
from omni_attn.selector import collect_attention_requests

SMALL = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 3}


def configure(output: Path | str = "out", model: str = "wan-tiny", **changes: Any) -> PipelineConfig:
    generation = SMALL | changes.pop("generation", {})
    values = {
        "pipeline": "wan",
        "model": model,
        "device": "cpu",
        "output": str(output),
        "generation": generation,
    }
    return PipelineConfig.model_validate(values | changes)


def latents_of(folder: Path) -> torch.Tensor:
    return load_file(folder / "latents.safetensors")["latents"]


def test_what_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = run(configure(folder))
    assert (result.output_folder, result.device.type, result.dtype) == (folder, "cpu", "float32")
    assert [path.name for path in result.files] == ["latents.safetensors", "contact_sheet.png"]
    with safe_open(folder / "latents.safetensors", "pt") as file:
        metadata = file.metadata()
        latents = file.get_tensor("latents")
    assert (latents.dtype, latents.shape) == (torch.float32, (1, 16, 3, 8, 12))
    attention = json.loads(metadata.pop("attention"))
    assert metadata == {
        "model": "wan-tiny",
        "seed": "0",
        "steps": "3",
        "scheduler": "UniPCMultistepScheduler",
    }
    assert {(row["role"], row["backend"]) for row in attention["roles"]} == {
        ("self", "TORCH_SDPA"),
        ("cross", "TORCH_SDPA"),
    }
    with Image.open(folder / "contact_sheet.png") as sheet:
        assert sheet.width > 300 and len(sheet.getcolors(2**24)) > 100


def test_notes_name_every_substitute(tmp_path: Path) -> None:
    assert run(configure(tmp_path, generation={"seed": 4})).notes == (
        "weights: seeded (seed 4) and untrained, so the frames show colour fields and no subject",
        "prompt embeddings: seeded (seed 4), in place of an encoded prompt",
        "negative prompt: zeros",
    )
    assert len(run(configure(tmp_path, generation={"guidance_scale": 1.0})).notes) == 2


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(configure(tmp_path / name, generation={"seed": seed}))
    first, again, other = (latents_of(tmp_path / name) for name in "abc")
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "generation", [{"num_inference_steps": 1}, {"num_inference_steps": 12, "guidance_scale": 8.0}]
)
def test_latents_have_a_sane_size(tmp_path: Path, seed: int, generation: dict[str, Any]) -> None:
    run(configure(tmp_path, generation=generation | {"seed": seed}))
    latents = latents_of(tmp_path)
    assert latents.isfinite().all()
    assert 0.3 < latents.std() < 10 and latents.abs().max() < 40


@pytest.mark.parametrize("seed", range(3))
def test_frames_are_smooth(tmp_path: Path, seed: int) -> None:
    run(configure(tmp_path, generation={"height": 128, "width": 192, "num_inference_steps": 8, "seed": seed}))
    latents = latents_of(tmp_path)
    latents = latents - latents.mean(dim=(2, 3, 4), keepdim=True)
    roughness = latents.diff(dim=4).std() / latents.std()
    assert roughness < 0.7  # noise has the square root of 2


def test_latents_that_are_not_finite_are_said_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = torch.full((1, 16, 3, 8, 12), torch.nan)
    monkeypatch.setattr(family.Wan22Pipeline, "__call__", lambda *_, **__: broken)
    result = run(configure(tmp_path))
    assert "not finite: float32 was too narrow" in result.notes[-1]
    assert all(path.is_file() for path in result.files)


def test_bfloat16(tmp_path: Path) -> None:
    result = run(configure(tmp_path, dtype="bfloat16"))
    dtypes = {parameter.dtype for parameter in result.model.parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}  # norms, time and modulation stay in float32
    assert latents_of(tmp_path).isfinite().all()


# The image-conditioned and two-expert presets with transformers that a test can run.
SMALL_PARTS = {
    "num_attention_heads": 12,
    "attention_head_dim": 32,
    "num_layers": 2,
    "ffn_dim": 64,
    "text_dim": 32,
}
LARGE = ("wan2.1-i2v-14b", "wan2.1-flf2v-14b", "wan2.2-t2v-a14b", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b")


def shrink(name: str) -> Any:
    preset = WAN_PRESETS[name]
    parts = dict(SMALL_PARTS)
    if preset.transformer.image_dim is not None:
        parts |= {"image_dim": 16, "added_kv_proj_dim": 384}
    return dataclasses.replace(preset, transformer=dataclasses.replace(preset.transformer, **parts))


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("image", [None, "seeded"])
def test_every_kind_of_preset_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, image: str | None
) -> None:
    if "t2v" in name and image is not None:
        image = None
    monkeypatch.setattr(source, "WAN_PRESETS", {name: shrink(name)})
    result = run(configure(tmp_path, name, generation={"image": image}))
    latents = latents_of(tmp_path)
    channels, scale = (48, 16) if name == "wan2.2-ti2v-5b" else (16, 8)
    assert latents.shape == (1, channels, 3, 64 // scale, 96 // scale)
    assert latents.isfinite().all() and 0.1 < latents.std() < 10
    has_image = "i2v" in name.replace("ti2v", "") or "flf2v" in name or image is not None
    assert any("image condition: seeded" in note for note in result.notes) == has_image
    roles = {layer.role for layer in result.model.modules() if isinstance(layer, Attention)}
    assert roles == {"self", "cross"} | ({"cross.image"} if name.startswith("wan2.1") else set())
    assert isinstance(result.model, nn.ModuleDict) and len(result.model) == (2 if "a14b" in name else 1)


LENGTHS: dict[str, tuple[dict[str, int], dict[str, tuple[int, int]]]] = {
    "wan2.1-t2v-1.3b": ({"height": 480, "width": 832}, {"self": (32760, 32760), "cross": (32760, 512)}),
    "wan2.1-i2v-14b": (
        {"height": 720, "width": 1280},
        {"self": (75600, 75600), "cross": (75600, 512), "cross.image": (75600, 257)},
    ),
    "wan2.1-flf2v-14b": (
        {"height": 480, "width": 832},
        {"self": (32760, 32760), "cross": (32760, 512), "cross.image": (32760, 514)},
    ),
    "wan2.2-ti2v-5b": (
        {"height": 704, "width": 1280, "num_frames": 121},
        {"self": (27280, 27280), "cross": (27280, 512)},
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_attention_lengths(name: str) -> None:
    size, lengths = LENGTHS[name]
    assert attention_lengths(configure(model=name, generation={"num_frames": 81} | size)) == lengths


@pytest.mark.parametrize(("name", "millions"), [("wan2.1-t2v-1.3b", 1419), ("wan2.2-t2v-a14b", 2 * 14288)])
def test_weight_bytes_are_exact(name: str, millions: int) -> None:
    with collect_attention_requests() as layers:
        model = build_meta_model(configure(model=name))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert weight_bytes(model, "float32") == 4 * sum(p.numel() for p in model.parameters())
    assert weight_bytes(model, "float32") / 4e6 == pytest.approx(millions, rel=1e-3)
    assert 0.5 < weight_bytes(model, "bfloat16") / weight_bytes(model, "float32") < 0.51
    assert {layer.request.role for layer in layers} == {"self", "cross"}


def test_weight_bytes_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        model = run(configure(tmp_path, dtype=dtype)).model
        with collect_attention_requests():
            assert weight_bytes(build_meta_model(configure()), dtype) == runtime.parameter_bytes(model)


def test_a_preset_that_does_not_fit_is_refused_before_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runtime, "available_memory", lambda _: 8 * 2**30)
    monkeypatch.setattr(family, "materialise_seeded", lambda *_: pytest.fail("weights were allocated"))
    with pytest.raises(ConfigError) as error:
        run(configure(tmp_path / "out", "wan2.2-t2v-a14b"))
    text = str(error.value)
    assert "wan2.2-t2v-a14b (2 transformers, 106.46 GiB of float32 weights" in text
    assert "8.00 GiB are available" in text and "wan-tiny" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "frames", "gib", "advice"),
    [
        ("wan2.1-t2v-1.3b", 5, 3, "Choose dtype: bfloat16 or a device with more memory."),
        ("wan2.1-t2v-1.3b", 241, 6, "Choose a smaller video or a device with more memory."),
        ("wan2.1-t2v-1.3b", 5, 1, "Choose a device with more memory."),
        (
            "wan2.1-t2v-14b",
            5,
            8,
            "a device with more memory or a smaller preset (wan2.1-t2v-1.3b or wan-tiny).",
        ),
    ],
)
def test_the_advice_of_a_refusal_would_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, frames: int, gib: int, advice: str
) -> None:
    monkeypatch.setattr(runtime, "available_memory", lambda _: gib * 2**30)
    size = {"height": 480, "width": 832} if frames > 5 else {}
    with pytest.raises(ConfigError) as error:
        run(configure(tmp_path / "out", model, generation={"num_frames": frames, **size}))
    assert str(error.value).endswith(advice)


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError) as error:
        attention_lengths(configure(model="wan2.2-ti2v-5b", generation={"height": 720, "width": 1296}))
    assert error.value.problems == (
        "generation.height: 720 does not fit wan2.2-ti2v-5b, which needs a multiple of 32. Nearest: 704 or 736.",
        "generation.width: 1296 does not fit wan2.2-ti2v-5b, which needs a multiple of 32. Nearest: 1280 or 1312.",
    )


def test_an_unknown_model_names_the_nearest_preset() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'wan2\.1-t2v-14b'\?"):
        build_meta_model(configure(model="wan21-t2v-14b"))


def test_a_preset_reads_no_text(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"generation\.prompt: wan-tiny is a preset, .* Give generation\.prompt_embeds"
    ):
        run(configure(tmp_path, generation={"prompt": "a fox"}))


def test_a_refused_backend_comes_before_the_folder(tmp_path: Path) -> None:
    with pytest.raises(BackendRejectedError, match="CUDNN_ATTN"):
        run(configure(tmp_path / "out", attention={"per_role": {"self": {"backend": "CUDNN_ATTN"}}}))
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match=r"output: .* cannot be a folder"):
        run(configure(tmp_path / "out"))
