"""`run` with pipeline: wan_causal: files that grow, frames by the VAE's memory, and refusals before any weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from omni_attn.config import PipelineConfig
from omni_attn.errors import BackendRejectedError, ConfigError
from omni_attn.inspection.target import Target, check_target
from omni_attn.models.wan.causal import family
from omni_attn.models.wan.causal.decoding import ChunkDecoder
from omni_attn.models.wan.causal.family import (
    attention_lengths,
    build_meta_model,
    number_of_steps,
    prepare,
    run,
)
from omni_attn.models.wan.causal.results import ChunkResults
from omni_attn.models.wan.pixels import decode_latents
from omni_attn.platforms import current_omni_platform
from omni_attn.selector import collect_attention_requests
from omni_attn.tuning.tune import tune
from tests.models.wan.causal.small import random
from tests.models.wan.tiny_checkpoints import FRAMES, HEIGHT, WIDTH, Z, build_pipeline, build_vae

SMALL = {"height": 64, "width": 96, "num_frames": 17, "chunk_frames": 2, "timesteps": [1000, 500]}


def configure(output: Path | str = "out", model: str = "causal-wan-tiny", **changes: Any) -> PipelineConfig:
    generation = SMALL | changes.pop("generation", {})
    values = {
        "pipeline": "wan_causal",
        "model": model,
        "device": "cpu",
        "output": str(output),
        "generation": generation,
    }
    return PipelineConfig.model_validate(values | changes)


def test_the_folder_grows_with_every_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    add = ChunkResults.add

    def watched(self: ChunkResults, chunk: torch.Tensor) -> None:
        add(self, chunk)
        lengths.append(load_file(tmp_path / "latents.safetensors")["latents"].shape[2])
        assert (tmp_path / "contact_sheet.png").is_file()

    monkeypatch.setattr(ChunkResults, "add", watched)
    result = run(configure(tmp_path))
    assert lengths == [2, 4, 5]
    assert [path.name for path in result.files] == ["latents.safetensors", "contact_sheet.png"]
    with safe_open(tmp_path / "latents.safetensors", "pt") as file:
        metadata = file.metadata()
        assert file.get_tensor("latents").shape == (1, 16, 5, 8, 12)
    assert (metadata["model"], metadata["steps"]) == ("causal-wan-tiny", "2")
    assert result.notes == (
        "weights: seeded (seed 0) and untrained, so the frames show colour fields and no subject",
        "prompt embeddings: seeded (seed 0), in place of an encoded prompt",
    )


def test_a_seed_decides_everything_and_settings_of_the_cache_nothing(tmp_path: Path) -> None:
    first = prepare(configure(tmp_path)).denoise()
    cache = {"layout": "HND", "block_size": 6}
    again = prepare(configure(tmp_path, kv_cache=cache, cudagraph_mode="FULL")).denoise()
    other = prepare(configure(tmp_path, generation={"seed": 1})).denoise()
    torch.testing.assert_close(again, first, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(other, first, atol=0.1)


@pytest.mark.parametrize(
    ("mode", "final", "warnings"),
    [("NONE", None, 0), ("FULL", "FULL", 0), ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", 1)],
)
def test_graphs_on_a_cpu_say_what_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, final: str | None, warnings: int
) -> None:
    ready = prepare(configure(tmp_path, cudagraph_mode=mode, generation={"num_frames": 5}))
    assert ready.denoise().isfinite().all()
    notes = [note for note in ready.notes if note.startswith("cudagraph_mode")]
    expected = f"cudagraph_mode: {final}, and there are no CUDA graphs on cpu"
    assert [note[: len(expected)] for note in notes] == ([] if final is None else [expected])
    assert caplog.text.count("is not supported with") == warnings


def test_a_whole_video_model_is_sampled_by_its_own_scheduler(tmp_path: Path) -> None:
    generation = {"timesteps": None, "num_inference_steps": 2, "guidance_scale": 3.0, "num_frames": 9}
    ready = prepare(configure(tmp_path, "wan-tiny", generation=generation))
    assert type(ready.pipeline.scheduler).__name__ == "UniPCMultistepScheduler"
    assert any("made for whole videos" in note for note in ready.notes)
    assert "negative prompt: zeros" in ready.notes
    assert ready.denoise().isfinite().all()
    few = prepare(configure(tmp_path, "fastwan-tiny", generation={"num_frames": 5}))
    assert few.pipeline.timesteps == (1000.0, 500.0)
    assert any("leave out to_gate_compress" in note for note in few.notes)


def test_chunks_decode_as_the_whole() -> None:
    vae, latents = build_vae(), random(1, Z, 6, 4, 6)
    decode = ChunkDecoder(vae)
    parts = [decode(chunk) for chunk in latents.split((1, 3, 2), dim=2)]
    assert [part.shape[1] for part in parts] == [1, 12, 8]
    torch.testing.assert_close(torch.cat(parts, dim=1), decode_latents(vae, latents), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_gives_frames_chunk_by_chunk(tmp_path: Path) -> None:
    build_pipeline("t2v", with_text=True, with_vae=True).save_pretrained(tmp_path / "checkpoint")
    size = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "prompt": "a red fox"}
    result = run(configure(tmp_path / "out", str(tmp_path / "checkpoint"), generation=size))
    frames = [f"frame_{index:04d}.png" for index in range(FRAMES)]
    names = [path.name for path in result.files]
    assert names == ["latents.safetensors", *frames[:5], "contact_sheet.png", *frames[5:]]
    assert all(path.is_file() for path in result.files)


def test_the_family_describes_what_runs() -> None:
    config = configure(generation={"window_frames": 3, "sink_frames": 1})
    assert attention_lengths(config) == {"self": (48, 96), "cross": (48, 512)}
    assert number_of_steps(config) == 6
    with collect_attention_requests() as layers:
        build_meta_model(config)
    assert {layer.request.role for layer in layers} == {"self", "cross"}
    specs = {layer.request.role: layer.request.kv_cache for layer in layers}
    assert [(spec.kind, spec.block_size) for spec in specs.values() if spec] == [
        ("sliding_window", 8),
        ("full", 16),
    ]


@pytest.mark.parametrize(
    ("size", "block_size"),
    [((480, 832), 8), ((720, 1280), 16), ((64, 96), 8), ((48, 80), 15), ((96, 80), 15)],
)
def test_pages_divide_a_latent_frame(size: tuple[int, int], block_size: int) -> None:
    config = configure(generation={"height": size[0], "width": size[1]})
    with collect_attention_requests() as layers:
        build_meta_model(config)
    assert {layer.request.kv_cache.block_size for layer in layers if layer.request.kv_cache} == {
        16,
        block_size,
    }


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"kv_cache": {"block_size": 7}}, ConfigError, "pages of 7 tokens do not divide a frame of 24"),
        ({"attention": {"default": "CUDNN_ATTN"}}, BackendRejectedError, "needs a paged KV cache"),
        ({"generation": {"prompt": "a fox"}}, ConfigError, r"generation\.prompt: .* no text encoder"),
        ({"generation": {"num_inference_steps": 3, "timesteps": None}}, ConfigError, "distilled to 8 steps"),
        ({"generation": {"num_frames": 4097}}, ConfigError, r"1025 latent frames.*at most 4093"),
        ({"model": "wan2.1-i2v-14b"}, ConfigError, "reads pictures or has two transformers"),
    ],
)
def test_refused_before_weights(
    changes: dict[str, Any],
    error: type[Exception],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_weights(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(family, "_load_weights", no_weights)
    with pytest.raises(error, match=text):
        prepare(configure(tmp_path, **changes))


def test_the_cache_counts_as_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_attn.models import runtime

    monkeypatch.setattr(runtime, "available_memory", lambda _: 2**25)
    prepare(configure(tmp_path))
    with pytest.raises(ConfigError, match=r"model: causal-wan-tiny .* GiB"):
        prepare(configure(tmp_path, generation={"num_frames": 4001}))
    prepare(configure(tmp_path, generation={"num_frames": 4001, "window_frames": 4}))


def test_commands_that_measure_or_look_say_why_not(tmp_path: Path) -> None:
    config, here = configure(tmp_path), current_omni_platform("cpu")
    found = tune(config, here, torch.device("cpu"))
    assert found.roles == () and set(found.unmeasured) == {"self", "cross"}
    assert all("attends over pages" in reason for reason in found.unmeasured.values())
    with pytest.raises(ConfigError, match="attend over the pages of a KV cache"):
        check_target(config, Target(step=0, layer=0))
