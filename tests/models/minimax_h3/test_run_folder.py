"""`run` with a checkpoint folder: text and pictures go in, diffusers' latents, frames and sound come out, offline."""

from __future__ import annotations

import json
import shutil
import socket
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3FL2VATextEncoderStep,
    MiniMaxH3TextEncoderStep,
    encode_vae_condition,
)
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import (
    MiniMaxH3CoreDenoiseStep,
    MiniMaxH3FL2VACoreDenoiseStep,
)
from PIL import Image
from safetensors.torch import load_file, save_file

from omni_attn.config import AttentionConfig, PipelineConfig
from omni_attn.errors import ConfigError
from omni_attn.models.minimax_h3.family import number_of_steps, run
from omni_attn.models.minimax_h3.source import load_source
from tests.models.minimax_h3.tiny_folders import TEXT_DIM, build_parts, build_text_encoder, save_folder
from tests.models.minimax_h3.tiny_pipelines import FRAMES, HEIGHT, WIDTH, run_reference

# diffusers' audio VAE still uses torch's old weight_norm.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")

PROMPT = "a red fox jumps over the river"
SIZE = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES}
SHORT = {"height": 64, "width": 64, "num_frames": 22, "num_inference_steps": 3}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DISTILLED = {
    "schema_version": "fasth3-inference-contract-v1",
    "dmd_denoising_steps": [999, 749, 500, 250],
    "transformer_forwards": 4,
    "video_scheduler_shift": 10.0,
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """All parts, and the folder they were saved in, made once."""
    parts = build_parts("tokenizer", "processor", "text_encoder", "vae", "audio_vae")
    return parts, save_folder(tmp_path_factory.mktemp("whole") / "checkpoint", parts)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Transformer and schedulers alone."""
    return save_folder(tmp_path_factory.mktemp("bare") / "checkpoint")


@pytest.fixture
def copied(bare: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return Path(shutil.copytree(bare, tmp_path / "copied"))


def configure(folder: Path, output: Path | str = "out", **generation: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "pipeline": "minimax_h3",
            "model": str(folder),
            "device": "cpu",
            "output": str(output),
            "generation": generation,
        }
    )


def picture(path: Path, seed: int, size: tuple[int, int] = (120, 80)) -> Path:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=generator)
    Image.fromarray(pixels.numpy()).save(path)
    return path


def encode(step: Any, parts: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    """What diffusers' encoder step makes, with a processor of pictures alone: the one of videos needs torchvision."""
    pad = parts["tokenizer"].convert_tokens_to_ids("<|image_pad|>")
    processor = SimpleNamespace(
        image_processor=parts["processor"],
        create_mm_token_type_ids=lambda batch: [[int(token == pad) for token in ids] for ids in batch],
    )
    components = SimpleNamespace(
        tokenizer=parts["tokenizer"],
        text_encoder=parts["text_encoder"],
        processor=processor,
        text_encoder_layer=50,
        text_tag=1,
        video_tag=0,
        _execution_device=torch.device("cpu"),
    )
    state = SimpleNamespace(prompt=PROMPT, **inputs)
    plain = type(
        "Step", (type(step),), {"get_block_state": lambda *_: state, "set_block_state": lambda *_: None}
    )
    plain()(components, None)
    return {"prompt_embeds": state.prompt_embeds, "text_token_tags": state.text_token_tags}


def test_a_prompt_goes_in_and_frames_and_sound_come_out(
    whole: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    parts, folder = whole
    result = run(configure(folder, tmp_path, prompt=PROMPT, num_inference_steps=4, seed=5, **SIZE))
    assert result.notes == ("size: 64 x 96 pixels, and the released model makes 768 x 1152 of this shape",)
    expected = run_reference(
        MiniMaxH3CoreDenoiseStep(),
        **encode(MiniMaxH3TextEncoderStep(), parts),
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(5),
        **SIZE,
    )
    names = ("latents", "audio_latents")
    found = tuple(load_file(tmp_path / f"{name}.safetensors")["latents"] for name in names)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    vae, audio_vae = parts["vae"], parts["audio_vae"]
    with torch.inference_mode():
        shape = (1, -1, 1, 1, 1)
        mean, deviation = torch.tensor(MEAN).view(shape), torch.tensor(DEVIATION).view(shape)
        statistics = (torch.tensor(vae.config.latents_std), torch.tensor(vae.config.latents_mean))
        scale, shift = (values.view(shape) for values in statistics)
        video = (vae.decode(found[0] * scale + shift).sample * deviation + mean).clamp(0, 1)
        scale, shift = (
            torch.tensor(values).view(1, -1, 1)
            for values in (audio_vae.config.latents_std, audio_vae.config.latents_mean)
        )
        sound = audio_vae.decode(found[1][0] * scale + shift, return_dict=False)[0][:, 0]
    frames = [f"frame_{index:04d}.png" for index in range(FRAMES)]
    assert [path.name for path in result.files] == [
        "latents.safetensors",
        "audio_latents.safetensors",
        "sound.wav",
        *frames,
        "contact_sheet.png",
    ]
    written = torch.from_numpy(np.array(Image.open(tmp_path / frames[60])))
    wanted = (video[0, :, 60].permute(1, 2, 0) * 255).round()
    assert (written.float() - wanted).abs().max() <= 1
    with wave.open(str(tmp_path / "sound.wav")) as file:
        assert (file.getnchannels(), file.getframerate()) == (2, 32000)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2)
    assert samples.shape == (207 * 800, 2)
    assert np.abs(samples - (sound.T * 32767).round().numpy()).max() <= 1


def test_pictures_are_encoded_and_shown_to_the_text_encoder(
    whole: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    parts, folder = whole
    first = picture(tmp_path / "first.png", 1)
    last = picture(tmp_path / "last.png", 2, (100, 90))
    run(
        configure(
            folder,
            tmp_path,
            prompt=PROMPT,
            image=str(first),
            last_image=str(last),
            num_inference_steps=3,
            seed=5,
            **SIZE,
        )
    )
    # The first picture is stretched to the video's 96 x 64, the second cut: 96 x 86 and then 11 rows off either end.
    lanczos = Image.Resampling.LANCZOS
    pictures = [
        Image.open(first).resize((WIDTH, HEIGHT), lanczos),
        Image.open(last).resize((96, 86), lanczos).crop((0, 11, 96, 75)),
    ]
    pixels = [torch.from_numpy(np.array(shown)).permute(2, 0, 1)[None, :, None] for shown in pictures]
    with torch.inference_mode():
        latents = [encode_vae_condition(parts["vae"], frame, MEAN, DEVIATION) for frame in pixels]
    text = encode(MiniMaxH3FL2VATextEncoderStep(), parts, keyframes=pictures)
    assert set(text["text_token_tags"].tolist()) == {0, 1}
    expected = run_reference(
        MiniMaxH3FL2VACoreDenoiseStep(),
        **text,
        keyframe_anchors=("first", "last"),
        condition_latents=latents,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(5),
        **SIZE,
    )
    found = load_file(tmp_path / "latents.safetensors")["latents"]
    torch.testing.assert_close(found, expected[0], rtol=1e-3, atol=1e-3)


def test_an_encoder_that_saw_no_keyframe_is_said(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    result = run(configure(whole[1], tmp_path, prompt=PROMPT, image="seeded", **SHORT))
    assert "prompt: encoded without a look at image, given as latents" in result.notes


@pytest.mark.parametrize("index", ["modular_model_index.json", "model_index.json"])
def test_a_distilled_folder_brings_its_grid(tmp_path: Path, index: str) -> None:
    folder = save_folder(
        tmp_path / "student",
        index=index,
        class_name="MiniMaxH3Pipeline",
        shifts=(10.0, 3.0),
        contract=DISTILLED,
    )
    source = load_source(str(folder))
    assert source.plan.grid == (0.999, 0.749, 0.5, 0.25, 0.0)
    assert (source.plan.video_shift, source.plan.audio_shift) == (10.0, 3.0)
    size = {key: value for key, value in SHORT.items() if key != "num_inference_steps"}
    config = configure(folder, tmp_path / "out", **size)
    assert number_of_steps(config) == 4
    assert any("4 forwards at base levels 0.999, 0.749, 0.5, 0.25" in note for note in run(config).notes)


@pytest.mark.parametrize(
    ("vsa", "is_said"),
    [
        ({"sparsity": 0.5}, False),
        ({"sparsity": 0.8}, True),
        ({"topk": 2}, True),
        ({"sparsity": 0.5, "tile_size": [4, 8, 8]}, True),
    ],
)
def test_another_sparsity_than_a_student_was_trained_with_is_said(
    copied: Path, tmp_path: Path, vsa: dict[str, Any], is_said: bool
) -> None:
    trained = {"video_scheduler_shift": 12.0, "vsa_sparsity": 0.5, "vsa_tile_size": 64}
    (copied / "fastvideo_inference.json").write_text(json.dumps(DISTILLED | trained))
    spec = {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": vsa}
    size = {key: value for key, value in SHORT.items() if key != "num_inference_steps"}
    config = configure(copied, tmp_path / "out", **size).model_copy(
        update={"attention": AttentionConfig.model_validate({"per_role": {"self": spec}})}
    )
    said = [
        note
        for note in run(config).notes
        if "was distilled with fastvideo_vsa.sparsity 0.5 in tiles of 64" in note
    ]
    assert bool(said) == is_said


def test_gates_are_found_in_the_weights(copied: Path, tmp_path: Path) -> None:
    file = copied / "transformer" / "diffusion_pytorch_model.safetensors"
    gates = {
        f"transformer_blocks.{block}.attn.to_gate_compress.weight": torch.full((256, 192), 0.01)
        for block in range(4)
    }
    save_file(load_file(file) | gates, file)
    assert load_source(str(copied)).transformer.gate_compress
    result = run(configure(copied, tmp_path / "out", **SHORT))
    assert any("leave out to_gate_compress" in note for note in result.notes)


def adapter_file(folder: Path, student: str) -> Path:
    """Gates that weigh, and nothing else."""
    gates = {
        f"transformer_blocks.{block}.attn.to_gate_compress.set_weight": torch.full((256, 192), 0.02)
        for block in range(4)
    }
    path = folder / "adapter_model.safetensors"
    save_file(gates, path, metadata={"format": "fastvideo-lora-v2", "finetuned_model": student})
    return path


@pytest.mark.parametrize(
    ("student", "steps"), [("FastVideo/FastVideo-FastH3-4-step-Preview-v1-VSA-DataFree", 4), ("me/mine", 2)]
)
def test_an_adapter_brings_its_gates_and_the_steps_of_its_student(
    bare: Path, tmp_path: Path, student: str, steps: int
) -> None:
    size = {key: value for key, value in SHORT.items() if key != "num_inference_steps" or steps == 2}
    config = configure(bare, tmp_path / "out", **size)
    config = config.model_copy(update={"adapter": str(adapter_file(tmp_path, student))})
    assert number_of_steps(config) == steps
    result = run(config)
    assert any("adapter_model.safetensors fused into the weights" in note for note in result.notes)
    gate = result.model["transformer"].transformer_blocks[0].attn.to_gate_compress  # type: ignore[index,union-attr]
    assert gate.weight.unique().tolist() == pytest.approx([0.02])


def test_an_adapter_needs_the_weights_it_was_made_for(tmp_path: Path) -> None:
    path = str(adapter_file(tmp_path, "me/mine"))
    with pytest.raises(ConfigError, match=r"minimax-h3-tiny is a preset with seeded ones.*in `model`"):
        load_source("minimax-h3-tiny", path)


def test_a_folder_without_an_audio_scheduler_says_what_it_takes(tmp_path: Path) -> None:
    source = load_source(str(save_folder(tmp_path / "old", shifts=(12.0, None))))
    assert source.plan.audio_shift == 3.0 and "sound is sampled with shift 3" in source.notes[0]


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoil_index(folder: Path) -> None:
    (folder / "modular_model_index.json").write_text('{"_class_name": "WanPipeline"}')


def spoil_scheduler(folder: Path) -> None:
    rewrite(folder / "scheduler" / "scheduler_config.json", _class_name="FlowMatchEulerDiscreteScheduler")


def spoil_shift(folder: Path) -> None:
    rewrite(folder / "audio_scheduler" / "scheduler_config.json", shift=-1)


def contradict(folder: Path) -> None:
    (folder / "fastvideo_inference.json").write_text(json.dumps(DISTILLED))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda folder: (folder / "modular_model_index.json").unlink(), "model_index.json is missing"),
        (spoil_index, "_class_name is 'WanPipeline'.*MiniMaxH3ModularPipeline"),
        (spoil_scheduler, "FlowMatchEulerDiscreteScheduler.*only MiniMaxH3Scheduler"),
        (spoil_shift, "shift is -1"),
        (contradict, "wants a video shift of 10, and the video scheduler has 12"),
        (lambda folder: shutil.rmtree(folder / "scheduler"), "scheduler_config.json is missing"),
        (
            lambda folder: (folder / "transformer").rename(folder / "transformer_ref"),
            "transformer_ref alone.*references",
        ),
        (
            lambda folder: rewrite(folder / "transformer" / "config.json", quantization_config={"a": 1}),
            "quantization_config",
        ),
        (lambda folder: rewrite(folder / "transformer" / "config.json", heads=3), "heads: unknown key"),
    ],
)
def test_broken_folders_are_told_from_their_small_files(copied: Path, spoil: Any, text: str) -> None:
    spoil(copied)
    with pytest.raises(ConfigError, match=text):
        load_source(str(copied))


def test_a_transformers_own_folder_is_no_pipeline(bare: Path) -> None:
    with pytest.raises(ConfigError, match="one transformer only"):
        load_source(str(bare / "transformer"))


def test_what_a_bare_folder_cannot_read(bare: Path, tmp_path: Path) -> None:
    image = str(picture(tmp_path / "first.png", 1))
    with pytest.raises(ConfigError) as caught:
        run(configure(bare, tmp_path, prompt=PROMPT, image=image, **SHORT))
    assert "has no text encoder" in str(caught.value) and "has no vae/" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"), [((50, TEXT_DIM), "has 50 layers"), ((51, 32), "gives 32 features")]
)
def test_another_text_encoder_is_refused(
    copied: Path, tmp_path: Path, size: tuple[int, int], text: str
) -> None:
    build_parts("tokenizer")["tokenizer"].save_pretrained(copied / "tokenizer")
    build_text_encoder(*size).save_pretrained(copied / "text_encoder")
    with pytest.raises(ConfigError, match=text):
        run(configure(copied, tmp_path / "out", prompt=PROMPT, **SHORT))
