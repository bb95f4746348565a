"""`run` with a preset: what is written, what is seeded and said so, what is refused before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from omni_attn.config import PipelineConfig
from omni_attn.errors import BackendRejectedError, ConfigError
from omni_attn.layer import Attention
from omni_attn.models import runtime
from omni_attn.models.minimax_h3 import family, schedule, source
from omni_attn.models.minimax_h3.config import REFINER_ROLE
from omni_attn.models.minimax_h3.family import attention_lengths, build_meta_model, number_of_steps, run
from omni_attn.models.minimax_h3.needs import weight_bytes
from omni_attn.models.minimax_h3.presets import MINIMAX_H3_PRESETS
from omni_attn.report import attention_report
from omni_attn.selector import collect_attention_requests

SMALL = {"height": 128, "width": 192, "num_frames": 22, "num_inference_steps": 4}
LATENT, SOUNDS = (7, 8, 12), 37
VSA = {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": {"sparsity": 0.8}}


def configure(output: Path | str = "out", model: str = "minimax-h3-tiny", **changes: Any) -> PipelineConfig:
    is_distilled = model.startswith("fasth3")  # to steps of its own
    size = {key: value for key, value in SMALL.items() if not (is_distilled and key == "num_inference_steps")}
    values = {
        "pipeline": "minimax_h3",
        "model": model,
        "device": "cpu",
        "output": str(output),
        "generation": size | changes.pop("generation", {}),
    }
    return PipelineConfig.model_validate(values | changes)


def latents_of(folder: Path, name: str = "latents") -> torch.Tensor:
    return load_file(folder / f"{name}.safetensors")["latents"]


def roughness(latents: torch.Tensor) -> float:
    """Differences between neighbours on the width, against the latents' own size; noise has the square root of 2."""
    latents = latents - latents.mean(dim=(2, 3, 4), keepdim=True)
    return float(latents.diff(dim=4).std() / latents.std())


def test_what_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = run(configure(folder))
    assert (result.output_folder, result.device.type, result.dtype) == (folder, "cpu", "float32")
    assert [path.name for path in result.files] == [
        "latents.safetensors",
        "audio_latents.safetensors",
        "contact_sheet.png",
    ]
    with safe_open(folder / "latents.safetensors", "pt") as file:
        metadata = file.metadata()
        latents = file.get_tensor("latents")
    assert (latents.dtype, latents.shape) == (torch.float32, (1, 24, *LATENT))
    assert latents_of(folder, "audio_latents").shape == (1, 2, 32, SOUNDS)
    attention = json.loads(metadata.pop("attention"))
    assert metadata == {
        "model": "minimax-h3-tiny",
        "seed": "0",
        "steps": "4",
        "scheduler": "MiniMaxH3Scheduler",
    }
    assert {(row["role"], row["backend"]) for row in attention["roles"]} == {
        ("self", "TORCH_SDPA"),
        (REFINER_ROLE, "TORCH_SDPA"),
    }
    with Image.open(folder / "contact_sheet.png") as sheet:
        assert sheet.width > 300 and len(sheet.getcolors(2**24)) > 100


def test_notes_name_every_substitute(tmp_path: Path) -> None:
    generation = {"seed": 4, "text_tokens": 9, "image": "seeded", "last_image": "seeded"}
    assert run(configure(tmp_path, generation=generation)).notes == (
        "weights: seeded (seed 4) and untrained, so the frames show colour fields and no subject",
        "prompt embeddings: seeded (seed 4), 9 rows in place of an encoded prompt",
        "image: seeded latents (seed 4), in place of an encoded picture",
        "last_image: seeded latents (seed 4), in place of an encoded picture",
    )


def test_a_distilled_preset_brings_its_steps_and_says_what_its_gates_miss(tmp_path: Path) -> None:
    dense = run(configure(tmp_path / "dense", "fasth3-tiny"))
    assert any("8 forwards at base levels 0.999, 0.874" in note for note in dense.notes)
    assert any("4 of 4 layers leave out to_gate_compress, which TORCH_SDPA" in note for note in dense.notes)
    attention = {"per_role": {"self": VSA}}
    sparse = run(configure(tmp_path / "sparse", "fasth3-tiny", attention=attention))
    assert not any("gates" in note for note in sparse.notes)
    rows = {row.role: row for row in attention_report(sparse.model).rows}
    assert (rows["self"].backend, rows[REFINER_ROLE].backend) == ("FASTVIDEO_VSA", "TORCH_SDPA")
    assert "1 of 4 tiles, beside 104 tokens" in rows["self"].reason  # 30 of text, 74 of sound
    found, other = latents_of(tmp_path / "sparse"), latents_of(tmp_path / "dense")
    assert found.isfinite().all() and not torch.allclose(found, other)


def test_a_seed_decides_everything(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(configure(tmp_path / name, generation={"seed": seed}))
    for kind in ("latents", "audio_latents"):
        first, again, other = (latents_of(tmp_path / name, kind) for name in "abc")
        assert torch.equal(first, again)
        assert not torch.allclose(first, other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [2, 5, 20])
def test_latents_have_a_sane_size(tmp_path: Path, seed: int, steps: int) -> None:
    run(configure(tmp_path, generation={"num_inference_steps": steps, "seed": seed}))
    for kind in ("latents", "audio_latents"):
        latents = latents_of(tmp_path, kind)
        assert latents.isfinite().all()
        assert 0.3 < latents.std() < 10 and latents.abs().max() < 40


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["minimax-h3-tiny", "fasth3-tiny"])
def test_frames_are_smooth(tmp_path: Path, seed: int, model: str) -> None:
    points = {"num_inference_steps": 9} if model.startswith("minimax") else {}
    run(configure(tmp_path, model, generation={"height": 192, "width": 288, "seed": seed} | points))
    assert roughness(latents_of(tmp_path)) < 0.75


def test_the_prompt_and_keyframes_have_a_say(tmp_path: Path) -> None:
    save_file({"prompt_embeds": torch.randn(5, 64)}, tmp_path / "prompt.safetensors")
    save_file({"condition_latents": torch.ones(1, 24, 1, *LATENT[1:])}, tmp_path / "frame.safetensors")
    run(configure(tmp_path / "plain"))
    plain = latents_of(tmp_path / "plain")
    for name, given in (
        ("prompt", {"prompt_embeds": str(tmp_path / "prompt.safetensors")}),
        ("image", {"image": str(tmp_path / "frame.safetensors")}),
        ("last_image", {"last_image": str(tmp_path / "frame.safetensors")}),
    ):
        result = run(configure(tmp_path / name, generation=given))
        assert any("read from" in note for note in result.notes)
        assert not torch.allclose(latents_of(tmp_path / name), plain)


def test_bfloat16(tmp_path: Path) -> None:
    result = run(configure(tmp_path, dtype="bfloat16"))
    dtypes = {parameter.dtype for parameter in result.model.parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}  # patches, time and heads stay in float32
    assert roughness(latents_of(tmp_path)) < 0.9


def test_latents_that_are_not_finite_are_said_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = torch.zeros(1, 24, *LATENT), torch.full((1, 2, 32, SOUNDS), torch.nan)
    monkeypatch.setattr(family.MiniMaxH3Pipeline, "__call__", lambda *_, **__: broken)
    result = run(configure(tmp_path))
    assert "not finite: float32 was too narrow" in result.notes[-1]
    assert all(path.is_file() for path in result.files)


def test_roles_and_lengths_of_the_released_model() -> None:
    config = PipelineConfig.model_validate({"pipeline": "minimax_h3", "model": "minimax-h3"})
    assert attention_lengths(config) == {"self": (37740, 37740), REFINER_ROLE: (30, 30)}
    assert number_of_steps(config) == 49
    with collect_attention_requests() as layers:
        model = build_meta_model(config)
    roles = [layer.role for layer in model.modules() if isinstance(layer, Attention)]
    assert (roles.count("self"), roles.count(REFINER_ROLE), len(layers)) == (50, 2, 52)
    # About 33 billion parameters, of which patches, time and heads are in float32.
    assert 61 < weight_bytes(model, "bfloat16") / 2**30 < 63


@pytest.mark.parametrize(("frames", "rows"), [(124, 37740), (192, 58126), (243, 73416), (345, 103996)])
def test_rows_of_published_sizes(frames: int, rows: int) -> None:
    config = {"pipeline": "minimax_h3", "model": "minimax-h3", "generation": {"num_frames": frames}}
    assert attention_lengths(PipelineConfig.model_validate(config))["self"] == (rows, rows)


def test_keyframes_and_files_count_in_lengths(tmp_path: Path) -> None:
    save_file({"prompt_embeds": torch.zeros(1, 12, 64)}, tmp_path / "prompt.safetensors")
    embeds = {"prompt_embeds": str(tmp_path / "prompt.safetensors"), "image": "seeded"}
    rows = 12 + (1 + 7) * 4 * 6 + 2 * 37
    assert attention_lengths(configure(generation=embeds)) == {
        "self": (rows, rows),
        REFINER_ROLE: (12, 12),
    }


def test_sizes_outside_of_training_are_said() -> None:
    found = source.load_source("minimax-h3")
    config = configure(model="minimax-h3", generation={"num_frames": 22})
    notes = found.size_notes(config.generation)  # type: ignore[arg-type]
    assert "size: 22 frames are 0.9 seconds" in notes[0] and "768 x 1152" in notes[1]


@pytest.mark.parametrize(
    ("generation", "texts"),
    [
        ({"prompt": "a fox"}, ["generation.prompt: minimax-h3-tiny is a preset", "[1, rows, 64]"]),
        ({"image": "nowhere.png"}, ["generation.image: there is no file 'nowhere.png'", "'seeded'"]),
        ({"last_image": "PICTURE"}, ["generation.last_image", "is a picture", "has no vae/"]),
        ({"prompt_embeds": "EMBEDS"}, ["has shape [1, 5, 60]", "expected [1, rows, 64]"]),
        ({"prompt_embeds": "TAGS"}, ["text_token_tags", "torch.int64 of shape [4]", "5 integers"]),
        ({"prompt_embeds": "FLAT"}, ["generation.prompt_embeds", "has shape [64]", "expected [1, rows, 64]"]),
        ({"prompt_embeds": "PICTURE"}, ["generation.prompt_embeds", "picture.png is not a readable"]),
        ({"image": "FRAME"}, ["generation.image", "[1, 24, 1, 4, 4]", "[1, 24, 1, 8, 12]"]),
    ],
)
def test_what_cannot_be_used_is_refused_before_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: dict[str, Any], texts: list[str]
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.png")
    save_file({"prompt_embeds": torch.zeros(1, 5, 60)}, tmp_path / "embeds.safetensors")
    tags = {"prompt_embeds": torch.zeros(1, 5, 64), "text_token_tags": torch.ones(4, dtype=torch.int64)}
    save_file(tags, tmp_path / "tags.safetensors")
    save_file({"prompt_embeds": torch.zeros(64)}, tmp_path / "flat.safetensors")
    save_file({"condition_latents": torch.zeros(1, 24, 1, 4, 4)}, tmp_path / "frame.safetensors")
    files = {
        "PICTURE": "picture.png",
        "EMBEDS": "embeds.safetensors",
        "TAGS": "tags.safetensors",
        "FLAT": "flat.safetensors",
        "FRAME": "frame.safetensors",
    }
    generation = {
        key: str(tmp_path / files[value]) if value in files else value for key, value in generation.items()
    }
    monkeypatch.setattr(family, "materialise_seeded", lambda *_: pytest.fail("weights were allocated"))
    with pytest.raises(ConfigError) as caught:
        run(configure(tmp_path / "out", generation=generation))
    for text in texts:
        assert text in str(caught.value)


def test_other_points_than_a_student_was_distilled_for_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"generation: fasth3-tiny: num_inference_steps is 50.*9 points"):
        number_of_steps(configure(model="fasth3-tiny", generation={"num_inference_steps": 50}))
    assert number_of_steps(configure(model="fasth3-tiny", generation={"num_inference_steps": 9})) == 8


def test_a_model_that_does_not_fit_names_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "available_memory", lambda _: 8 * 2**30)
    with pytest.raises(
        ConfigError, match=r"minimax-h3 .* needs .* GiB on cpu, and 8.00 GiB.*minimax-h3-tiny"
    ):
        run(configure(model="minimax-h3"))


def test_an_old_diffusers_comes_before_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(family, "materialise_seeded", lambda *_: pytest.fail("weights were allocated"))
    monkeypatch.setattr(schedule, "import_extra", lambda *_: SimpleNamespace(__version__="0.35.0"))
    with pytest.raises(ConfigError, match=r"diffusers 0.35.0 has no MiniMaxH3Scheduler.*update diffusers"):
        run(configure(tmp_path))


def test_a_refused_role_comes_before_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(family, "materialise_seeded", lambda *_: pytest.fail("weights were allocated"))
    with pytest.raises(BackendRejectedError, match=r'role "self".*FLASH_ATTN'):
        run(configure(tmp_path, attention={"per_role": {"self": "FLASH_ATTN"}}))


@pytest.mark.parametrize("key", ["self", "default"])
def test_a_sparse_self_never_reaches_the_refiner(key: str) -> None:
    attention = {"default": VSA} if key == "default" else {"per_role": {"self": VSA}}
    if key == "default":  # which a person states for every role, and the refiner has no video grid
        with pytest.raises(BackendRejectedError, match=REFINER_ROLE):
            run(configure(attention=attention))
        return
    config = configure(attention=attention)
    spec, where = config.attention.resolve(REFINER_ROLE, "text")
    assert (spec, where) == (None, None)


def test_unknown_models_are_told() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'minimax-h3'.*Presets: minimax-h3, fasth3"):
        run(configure(model="minimax_h3"))


def test_presets_are_named_as_they_say() -> None:
    assert {name: preset.name for name, preset in MINIMAX_H3_PRESETS.items()} == {
        name: name for name in ("minimax-h3", "fasth3", "minimax-h3-tiny", "fasth3-tiny")
    }
    gated = [name for name, preset in MINIMAX_H3_PRESETS.items() if preset.transformer.gate_compress]
    assert gated == ["fasth3", "fasth3-tiny"]
