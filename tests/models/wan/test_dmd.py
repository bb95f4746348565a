"""Distilled checkpoints: the three steps against their formula, what they refuse, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from omni_attn.config import PipelineConfig
from omni_attn.errors import ConfigError, MetadataError
from omni_attn.models.seeding import Stream, seeded_generator
from omni_attn.models.wan.conditions import ImageCondition, PromptEmbeddings, seeded_prompt
from omni_attn.models.wan.dmd import DMD_TIMESTEPS, build_dmd_scheduler, set_dmd_timesteps
from omni_attn.models.wan.family import run
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.pipeline import Wan22Pipeline
from omni_attn.models.wan.presets import WAN_PRESETS
from omni_attn.models.wan.source import load_source
from omni_attn.selector import use_attention_config
from tests.models.wan.gated import NAME, gated_backend
from tests.models.wan.tiny_checkpoints import build_pipeline, build_scheduler
from tests.models.wan.tiny_models import BASE, config_of, seed_weights

LATENT = (1, 4, 3, 4, 6)
PROMPT = PromptEmbeddings(torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(1)), None)


def distilled(seed: int = 0) -> WanModel:
    model = WanModel(config_of("t2v"), is_dmd=True).eval()
    seed_weights(model, seed)
    return model


def noise_level(timestep: float, shift: float) -> float:
    """Of the nearest step among 1000 evenly spaced ones, shifted."""
    levels = [shift * (step / 1000) / (1 + (shift - 1) * (step / 1000)) for step in range(1, 1001)]
    return min(levels, key=lambda level: abs(1000 * level - timestep))


@pytest.mark.parametrize("shift", [8.0, 5.0])
def test_noise_levels_are_those_of_the_nearest_training_steps(shift: float) -> None:
    scheduler = build_dmd_scheduler(shift)
    set_dmd_timesteps(scheduler, torch.device("cpu"))
    assert scheduler.timesteps.tolist() == [1000.0, 757.0, 522.0]
    expected = [noise_level(timestep, shift) for timestep in DMD_TIMESTEPS]
    torch.testing.assert_close(scheduler.sigmas, torch.tensor([*expected, 0.0]), atol=1e-6, rtol=0)
    if shift == 8.0:  # the exact steps 1, 0.28 and 0.12 of the even schedule
        assert expected == pytest.approx([1.0, 2.24 / 2.96, 0.96 / 1.84], abs=1e-12)


@pytest.mark.parametrize("batch", [1, 2])
def test_steps_go_to_the_clean_latent_and_add_fresh_noise(batch: int) -> None:
    model = distilled()
    latents = torch.randn(batch, *LATENT[1:], generator=torch.Generator().manual_seed(3))
    scheduler = build_dmd_scheduler()
    pipeline = Wan22Pipeline(transformer=model, scheduler=scheduler)
    found = pipeline(PROMPT, latents, generator=torch.Generator().manual_seed(7))

    drawn, sample = torch.Generator().manual_seed(7), latents.double()
    levels = [noise_level(timestep, 8.0) for timestep in DMD_TIMESTEPS]
    with torch.no_grad():
        for index, timestep in enumerate(DMD_TIMESTEPS):
            velocity = model(
                sample.float(),
                torch.full((batch,), float(timestep)),
                PROMPT.positive.expand(batch, -1, -1),
            )
            clean = sample - levels[index] * velocity.double()
            noise = torch.randn(latents.shape, generator=drawn).double()
            following = levels[index + 1] if index < 2 else 0.0
            sample = (1 - following) * clean + following * noise
    assert sample.std() > 0.3  # a comparison of zeros would prove nothing
    torch.testing.assert_close(found, sample.float(), atol=1e-4, rtol=1e-4)
    again = pipeline(PROMPT, latents, generator=torch.Generator().manual_seed(7))
    assert torch.equal(found, again)


def test_each_step_is_one_forward_at_its_timestep() -> None:
    model, times = distilled(), []
    model.register_forward_pre_hook(lambda _, given, __: times.append(given[1].tolist()), with_kwargs=True)
    Wan22Pipeline(transformer=model, scheduler=build_dmd_scheduler())(PROMPT, torch.randn(LATENT))
    assert times == [[1000.0], [757.0], [522.0]]


def test_a_known_first_frame_stays_as_it_is() -> None:
    """TI2V: per-token times and a given frame, with the same three steps."""
    model = distilled()
    frame = torch.randn(1, 4, 1, 4, 6)
    pipeline = Wan22Pipeline(transformer=model, scheduler=build_dmd_scheduler(), expand_timesteps=True)
    found = pipeline(PROMPT, torch.randn(LATENT), condition=ImageCondition(latents=frame))
    assert torch.equal(found[:, :, :1], frame) and found.isfinite().all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"num_inference_steps": 4}, "num_inference_steps is 4, and the model is distilled to 3 steps"),
        ({"guidance_scale": 5.0}, r"guidance_scale is 5\.0, and guidance is distilled into the model"),
        ({"guidance_scale_2": 1.0}, "one transformer"),
    ],
)
def test_calls_that_distilled_models_cannot_serve(call: dict[str, Any], text: str) -> None:
    pipeline = Wan22Pipeline(transformer=distilled(), scheduler=build_dmd_scheduler())
    with pytest.raises(MetadataError, match=text):
        pipeline(PROMPT, torch.randn(LATENT), **call)
    assert pipeline(
        PROMPT, torch.randn(LATENT), num_inference_steps=3, guidance_scale=1.0
    ).shape == torch.Size(LATENT)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"scheduler": build_scheduler()}, r"UniPCMultistepScheduler .* use .*build_dmd_scheduler"),
        ({"transformer_2": distilled(1), "boundary_ratio": 0.9}, "leave transformer_2 out"),
    ],
)
def test_pipelines_that_distilled_models_cannot_have(parts: dict[str, Any], text: str) -> None:
    with pytest.raises(MetadataError, match=text):
        Wan22Pipeline(**({"transformer": distilled(), "scheduler": build_dmd_scheduler()} | parts))


def configure(model: Path | str, output: Path, backend: str = NAME, **generation: Any) -> PipelineConfig:
    values = {
        "pipeline": "wan",
        "model": str(model),
        "attention": {"per_role": {"self": backend}},
        "generation": {"height": 64, "width": 96, "num_frames": 9} | generation,
        "device": "cpu",
        "output": str(output),
    }
    return PipelineConfig.model_validate(values)


def test_a_preset_runs_in_three_steps(tmp_path: Path) -> None:
    with gated_backend() as seen:
        result = run(configure("fastwan-tiny", tmp_path))
    assert result.notes == (
        "weights: seeded (seed 0) and untrained, so the frames show colour fields and no subject",
        "steps: timesteps 1000, 757, 522 without guidance, as fastwan-tiny was distilled for them",
        "prompt embeddings: seeded (seed 0), in place of an encoded prompt",
    )
    assert len(seen.gates) == 3 * WAN_PRESETS["fastwan-tiny"].transformer.num_layers
    assert all(record.preserve_vsa_all_blocks for record in seen.records)
    with safe_open(tmp_path / "latents.safetensors", "pt") as file:
        metadata, latents = file.metadata(), file.get_tensor("latents")
    assert (metadata["steps"], metadata["scheduler"]) == ("3", "FlowMatchEulerDiscreteScheduler")
    assert latents.isfinite().all() and 0.3 < latents.std() < 10 and latents.abs().max() < 40


def test_a_file_may_state_what_the_checkpoint_was_distilled_for(tmp_path: Path) -> None:
    with gated_backend():
        stated = run(configure("fastwan-tiny", tmp_path, num_inference_steps=3, guidance_scale=0.5))
    assert not [note for note in stated.notes if note.startswith("steps")]


@pytest.mark.parametrize(
    ("generation", "text"),
    [
        ({"num_inference_steps": 50}, "fastwan-tiny: num_inference_steps is 50"),
        ({"guidance_scale": 5.0}, r"fastwan-tiny: guidance_scale is 5\.0"),
        ({"image": "seeded"}, "makes video from text alone"),
    ],
)
def test_requests_that_a_distilled_preset_refuses(
    tmp_path: Path, generation: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        run(configure("fastwan-tiny", tmp_path, "TORCH_SDPA", **generation))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder as FastWan's: WanDMDPipeline, gates at block level, and a scheduler/ that is not the one to use."""
    folder = tmp_path / "checkpoint"
    build_pipeline("t2v").save_pretrained(folder)
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": "WanDMDPipeline"}))
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    size = BASE["num_attention_heads"] * BASE["attention_head_dim"]
    state: dict[str, Tensor] = load_file(weights)
    for block in range(BASE["num_layers"]):
        state[f"blocks.{block}.to_gate_compress.weight"] = torch.full((size, size), 0.01)
        state[f"blocks.{block}.to_gate_compress.bias"] = torch.full((size,), 0.5)
    save_file(state, weights)
    return folder


def test_a_checkpoint_folder_runs(checkpoint: Path, tmp_path: Path) -> None:
    with gated_backend(topk=64) as seen:  # all tiles: a native checkpoint would run dense
        run(configure(checkpoint, tmp_path / "out", seed=2))
        with use_attention_config({"per_role": {"self": NAME}}, device="cpu"):
            model = WanModel.from_pretrained(checkpoint / "transformer", is_dmd=True)
        generator = seeded_generator(2, Stream.NOISE)
        latents = torch.randn(1, 4, 3, 8, 12, generator=generator)
        prompt = seeded_prompt(load_source(str(checkpoint)), 2, with_negative=False)
        pipeline = Wan22Pipeline(transformer=model, scheduler=build_dmd_scheduler())
        expected = pipeline(prompt, latents, generator=generator)
    assert len(seen.gates) == 2 * 3 * 2 and all(gate is not None for gate in seen.gates)
    assert all(record.preserve_vsa_all_blocks for record in seen.records)
    assert torch.equal(load_file(tmp_path / "out" / "latents.safetensors")["latents"], expected)


def test_two_distilled_experts_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    index = checkpoint / "model_index.json"
    more = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.9}
    index.write_text(json.dumps(json.loads(index.read_text()) | more))
    (checkpoint / "transformer_2").symlink_to(checkpoint / "transformer")
    with pytest.raises(ConfigError, match="WanDMDPipeline with transformer_2"):
        run(configure(checkpoint, tmp_path / "out", "TORCH_SDPA"))


def test_a_folder_needs_no_scheduler_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "scheduler" / "scheduler_config.json").unlink()
    assert run(configure(checkpoint, tmp_path / "out", "TORCH_SDPA")).files
