"""`run` with a checkpoint folder: text and pictures go in, diffusers' latents and frames come out, offline."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from omni_attn.config import PipelineConfig
from omni_attn.errors import ConfigError
from omni_attn.models.wan.family import run
from tests.models.wan.tiny_checkpoints import CLIP_TOKENS, FRAMES, HEIGHT, LATENT, WIDTH, Z, build_pipeline

PROMPT, NEGATIVE = "a  red fox\njumps over the &amp; river", "blurry"
SIZE = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "num_inference_steps": 2}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(diffusers' pipeline, the folder it was saved in) by kind and parts, made once."""
    made: dict[Any, Any] = {}

    def get(kind: str, **parts: bool) -> tuple[Any, Path]:
        key = (kind, *sorted(parts.items()))
        if key not in made:
            pipeline, folder = build_pipeline(kind, **parts), tmp_path_factory.mktemp(kind) / "checkpoint"
            pipeline.save_pretrained(folder)
            made[key] = pipeline, folder
        return made[key]

    return get


def configure(folder: Path, output: Path, **generation: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "pipeline": "wan",
            "model": str(folder),
            "device": "cpu",
            "output": str(output),
            "generation": SIZE | generation,
        }
    )


def picture(path: Path) -> Path:
    pixels = torch.randint(0, 256, (20, 30, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    Image.fromarray(pixels.numpy()).save(path)
    return path


@pytest.mark.parametrize("kind", ["t2v", "two_experts", "ti2v"])
def test_a_prompt_goes_in_and_frames_come_out(checkpoints: Any, tmp_path: Path, kind: str) -> None:
    theirs, folder = checkpoints(kind, with_text=True, with_vae=True)
    config = configure(folder, tmp_path / "out", prompt=PROMPT, negative_prompt=NEGATIVE, seed=5)
    result = run(config)
    assert result.notes == ()
    options = {"prompt": PROMPT, "negative_prompt": NEGATIVE, **SIZE}
    latents = load_file(tmp_path / "out" / "latents.safetensors")["latents"]
    expected = theirs(**options, generator=torch.Generator().manual_seed(5), output_type="latent").frames
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-4)

    video = theirs(**options, generator=torch.Generator().manual_seed(5), output_type="pt").frames[0]
    names = [f"frame_{index:04d}.png" for index in range(FRAMES)]
    assert [path.name for path in result.files] == ["latents.safetensors", *names, "contact_sheet.png"]
    for index, name in enumerate(names):
        with Image.open(tmp_path / "out" / name) as frame:
            pixels = torch.frombuffer(bytearray(frame.tobytes()), dtype=torch.uint8).view(HEIGHT, WIDTH, 3)
        difference = pixels.permute(2, 0, 1).float() / 255 - video[index]
        assert difference.abs().max() < 1.5 / 255


def test_no_prompt_is_the_empty_one(checkpoints: Any, tmp_path: Path) -> None:
    theirs, folder = checkpoints("t2v", with_text=True)
    result = run(configure(folder, tmp_path / "out"))
    assert "prompt: none was given, the empty one was encoded" in result.notes
    latents = load_file(tmp_path / "out" / "latents.safetensors")["latents"]
    expected = theirs(
        prompt="", **SIZE, generator=torch.Generator().manual_seed(0), output_type="latent"
    ).frames
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["i2v", "i2v_2.2", "ti2v_image"])
def test_a_picture_starts_the_video(checkpoints: Any, tmp_path: Path, kind: str) -> None:
    theirs, folder = checkpoints(kind, with_text=True, with_vae=True)
    image = picture(tmp_path / "start.png")
    run(configure(folder, tmp_path / "out", prompt=PROMPT, image=str(image)))
    with Image.open(image) as opened:
        expected = theirs(
            image=opened,
            prompt=PROMPT,
            **SIZE,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).frames
    latents = load_file(tmp_path / "out" / "latents.safetensors")["latents"]
    torch.testing.assert_close(latents, expected, rtol=1e-4, atol=1e-4)


def test_ti2v_without_a_picture_is_text_to_video(checkpoints: Any, tmp_path: Path) -> None:
    _, folder = checkpoints("ti2v_image", with_text=True, with_vae=True)
    result = run(configure(folder, tmp_path / "out", prompt=PROMPT))
    assert result.notes == ()
    seeded = run(configure(folder, tmp_path / "out2", prompt=PROMPT, image="seeded"))
    assert "image condition: seeded latents (seed 0), in place of an encoded picture" in seeded.notes
    first, second = (
        load_file(tmp_path / name / "latents.safetensors")["latents"] for name in ("out", "out2")
    )
    assert not torch.allclose(first, second)


def test_an_image_model_without_a_picture_gets_a_seeded_one(checkpoints: Any, tmp_path: Path) -> None:
    _, folder = checkpoints("i2v_2.2")
    result = run(configure(folder, tmp_path / "out"))
    assert "image condition: seeded latents (seed 0), in place of an encoded picture" in result.notes


def test_embeddings_and_conditions_from_files(checkpoints: Any, tmp_path: Path) -> None:
    _, folder = checkpoints("i2v")
    prompt, image = tmp_path / "prompt.safetensors", tmp_path / "image.safetensors"
    embeds = {"prompt_embeds": torch.randn(7, 32), "negative_prompt_embeds": torch.randn(1, 512, 32)}
    save_file(embeds, prompt)
    condition = {
        "condition_latents": torch.randn(1, Z, *LATENT),
        "image_embeds": torch.randn(1, CLIP_TOKENS, 6),
    }
    condition["mask"] = torch.ones(1, 4, *LATENT)
    save_file(condition | {"image_embeds": torch.randn(1, 257, 6)}, image)
    result = run(configure(folder, tmp_path / "out", prompt_embeds=str(prompt), image=str(image)))
    read = [f"prompt embeddings: read from {prompt}", f"image condition: read from {image}"]
    assert [note for note in result.notes if "vae" not in note] == read
    del embeds["negative_prompt_embeds"]
    save_file(embeds, prompt)
    result = run(configure(folder, tmp_path / "out2", prompt_embeds=str(prompt), image=str(image)))
    assert f"negative prompt: zeros, since {prompt} has no negative_prompt_embeds" in result.notes
    first, second = (
        load_file(tmp_path / name / "latents.safetensors")["latents"] for name in ("out", "out2")
    )
    assert first.isfinite().all() and not torch.allclose(first, second)


def test_without_text_encoder_embeddings_are_seeded(checkpoints: Any, tmp_path: Path) -> None:
    _, folder = checkpoints("t2v")
    result = run(configure(folder, tmp_path / "out"))
    assert "prompt embeddings: seeded (seed 0), in place of an encoded prompt" in result.notes
    assert any("has no vae/" in note for note in result.notes)
    assert [path.name for path in result.files] == ["latents.safetensors", "contact_sheet.png"]


REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a prompt without text encoder": (
        "t2v",
        {"prompt": "a fox"},
        r"prompt: .* has no text encoder .* prompt_embeds",
    ),
    "a negative prompt without text encoder": (
        "t2v",
        {"negative_prompt": "x"},
        r"negative_prompt: .* has no text enc",
    ),
    "a second scale for one expert": (
        "t2v",
        {"guidance_scale_2": 2.0},
        "guidance_scale_2: .* has one transformer",
    ),
    "an image for text-to-video": ("t2v", {"image": "seeded"}, "image: .* from text alone"),
    "an image that is not there": ("i2v_2.2", {"image": "nowhere.png"}, "no file 'nowhere.png'"),
    "embeddings that are not there": (
        "t2v",
        {"prompt_embeds": "nowhere.safetensors"},
        "no file 'nowhere.saf",
    ),
}


@pytest.mark.parametrize(("kind", "generation", "text"), REQUESTS.values(), ids=REQUESTS)
def test_requests_that_cannot_be_met(
    checkpoints: Any, tmp_path: Path, kind: str, generation: dict[str, Any], text: str
) -> None:
    _, folder = checkpoints(kind)
    with pytest.raises(ConfigError, match=text):
        run(configure(folder, tmp_path / "out", **generation))


def test_a_negative_prompt_that_nothing_reads(checkpoints: Any, tmp_path: Path) -> None:
    _, folder = checkpoints("t2v", with_text=True)
    with pytest.raises(ConfigError, match="nothing is compared with it at guidance_scale 1"):
        run(configure(folder, tmp_path, prompt="a", negative_prompt="b", guidance_scale=1.0))


def test_a_picture_needs_a_vae_and_clip(checkpoints: Any, tmp_path: Path) -> None:
    image = str(picture(tmp_path / "start.png"))
    _, without_vae = checkpoints("i2v_2.2")
    with pytest.raises(ConfigError, match="no vae/ to encode it"):
        run(configure(without_vae, tmp_path / "out", image=image))
    _, first_and_last = checkpoints("flf2v", with_vae=True)
    with pytest.raises(ConfigError, match="a first and a last frame"):
        run(configure(first_and_last, tmp_path / "out", image=image))
    _, complete = checkpoints("i2v", with_text=True, with_vae=True)
    without_clip = tmp_path / "without_clip"
    shutil.copytree(complete, without_clip)
    shutil.rmtree(without_clip / "image_encoder")
    with pytest.raises(ConfigError, match="image_encoder is missing"):
        run(configure(without_clip, tmp_path / "out", image=image))


WRONG_FILES: dict[str, tuple[str, str, dict[str, tuple[int, ...]], str]] = {
    "other keys": (
        "t2v",
        "prompt_embeds",
        {"embeds": (1, 512, 32)},
        r"keys \['embeds'\]; expected prompt_embeds",
    ),
    "other width": (
        "t2v",
        "prompt_embeds",
        {"prompt_embeds": (1, 512, 16)},
        r"\[1, 512, 16\]; expected \[1, 512, 32\]",
    ),
    "too many rows": (
        "t2v",
        "prompt_embeds",
        {"prompt_embeds": (513, 32)},
        r"\[513, 32\]; expected \[1, 512, 32\]",
    ),
    "no image tokens": (
        "i2v",
        "image",
        {"condition_latents": (1, Z, *LATENT)},
        r"image_embeds of shape \[1, 257, 6\]",
    ),
    "another size": (
        "i2v_2.2",
        "image",
        {"condition_latents": (1, Z, 3, 4, 5)},
        r"expected \[1, 4, 3, 4, 6\]",
    ),
}


@pytest.mark.parametrize(("kind", "field", "shapes", "text"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_files_that_do_not_fit(
    checkpoints: Any, tmp_path: Path, kind: str, field: str, shapes: dict[str, tuple[int, ...]], text: str
) -> None:
    _, folder = checkpoints(kind)
    file = tmp_path / "wrong.safetensors"
    save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, file)
    with pytest.raises(ConfigError, match=text):
        run(configure(folder, tmp_path / "out", **{field: str(file)}))


def test_a_file_that_is_no_safetensors(checkpoints: Any, tmp_path: Path) -> None:
    _, folder = checkpoints("t2v")
    (tmp_path / "wrong.safetensors").write_text("not tensors")
    with pytest.raises(ConfigError, match=r"not a readable \.safetensors file"):
        run(configure(folder, tmp_path / "out", prompt_embeds=str(tmp_path / "wrong.safetensors")))


def broken(folder: Path, target: Path, **index: Any) -> Path:
    """A copy of a checkpoint with other entries in its model_index.json."""
    shutil.copytree(folder, target)
    path = target / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | index))
    return target


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (
            {"_class_name": "WanCausalDMDPipeline"},
            r"WanCausalDMDPipeline.* chunk by chunk.*pipeline: wan_causal",
        ),
        ({"_class_name": "FluxPipeline"}, r"_class_name is 'FluxPipeline'; .* WanPipeline"),
        ({"boundary_ratio": 0.9}, r"boundary_ratio is 0\.9 with 1 transformer"),
    ],
)
def test_other_pipelines_are_refused(
    checkpoints: Any, tmp_path: Path, index: dict[str, Any], text: str
) -> None:
    _, folder = checkpoints("t2v")
    with pytest.raises(ConfigError, match=text):
        run(configure(broken(folder, tmp_path / "copy", **index), tmp_path / "out"))


def test_incomplete_folders_name_what_is_missing(checkpoints: Any, tmp_path: Path) -> None:
    _, folder = checkpoints("t2v")
    with pytest.raises(ConfigError, match=r"one transformer only; .*model_index\.json") as error:
        run(configure(folder / "transformer", tmp_path / "out"))
    assert f"Give its pipeline's folder: {folder}" in str(error.value)
    alone = tmp_path / "alone"
    shutil.copytree(folder / "transformer", alone)
    with pytest.raises(ConfigError, match=r"scheduler_config\.json, which are missing\. .*save_pretrained"):
        run(configure(alone, tmp_path / "out"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is not a pipeline checkpoint"):
        run(configure(tmp_path / "empty", tmp_path / "out"))
    (tmp_path / "empty" / "modular_model_index.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"holds modular_model_index\.json.*another family.*Correct `pipeline`"
    ):
        run(configure(tmp_path / "empty", tmp_path / "out"))
    incomplete = broken(folder, tmp_path / "copy")
    shutil.rmtree(incomplete / "scheduler")
    with pytest.raises(ConfigError, match=r"scheduler_config\.json is missing"):
        run(configure(incomplete, tmp_path / "out"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"_class_name": "NoScheduler"}, "has no such scheduler"),
        ({"prediction_type": "epsilon"}, "prediction_type is 'epsilon'"),
    ],
)
def test_schedulers_that_do_not_fit(
    checkpoints: Any, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    _, folder = checkpoints("t2v")
    copy = broken(folder, tmp_path / "copy")
    path = copy / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=text):
        run(configure(copy, tmp_path / "out"))
