"""`generation` of wan_causal: defaults, and chunks, windows and timesteps that contradict one another."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from omni_attn.config import KVCacheConfig, PipelineConfig, WanCausalGenerationConfig
from omni_attn.config.loading import load_pipeline
from omni_attn.errors import ConfigError

BASE: dict[str, Any] = {"pipeline": "wan_causal", "model": "causal-wan-tiny"}


def test_defaults() -> None:
    generation = PipelineConfig.model_validate(BASE).generation
    assert isinstance(generation, WanCausalGenerationConfig)
    assert generation.model_dump() == {
        "height": 480,
        "width": 832,
        "num_frames": 81,
        "num_inference_steps": 8,
        "guidance_scale": 1.0,
        "negative_prompt": None,
        "seed": 0,
        "prompt": None,
        "prompt_embeds": None,
        "chunk_frames": 3,
        "window_frames": None,
        "sink_frames": 0,
        "timesteps": None,
        "context_timestep": 0.0,
    }


def test_a_file_says_all_of_it() -> None:
    text = """
    pipeline: wan_causal
    model: causal-wan-tiny
    cudagraph_mode: FULL
    kv_cache: {layout: HND, dtype: fp8_e4m3, block_size: 8}
    generation: {chunk_frames: 2, window_frames: 6, sink_frames: 1, timesteps: [1000, 937.5, 625]}
    """
    config = load_pipeline(text, environ={})
    assert config.kv_cache == KVCacheConfig(layout="HND", dtype="fp8_e4m3", block_size=8)
    generation = config.generation
    assert isinstance(generation, WanCausalGenerationConfig)
    assert generation.timesteps == (1000.0, 937.5, 625.0)
    assert PipelineConfig.model_validate(config.model_dump(exclude_unset=True)) == config
    assert hash(config) == hash(load_pipeline(text, environ={}))


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"chunk_frames": 0}, "chunk_frames", "greater than or equal to 1"),
        ({"window_frames": 2}, "window_frames", "must be at least chunk_frames, 3"),
        ({"chunk_frames": 5, "window_frames": 4}, "window_frames", "at least chunk_frames, 5.*found 4"),
        ({"sink_frames": 1}, "sink_frames", "must be 0 without window_frames"),
        ({"sink_frames": -1, "window_frames": 3}, "sink_frames", "greater than or equal to 0"),
        ({"timesteps": []}, "timesteps", "at least 1 item"),
        ({"timesteps": [500, 1000]}, "timesteps", "must go down from at most 1000"),
        ({"timesteps": [1001, 500]}, "timesteps", "must go down from at most 1000"),
        ({"timesteps": [500, 0]}, "timesteps", "stay above 0"),
        ({"timesteps": [500, 500]}, "timesteps", "must go down"),
        ({"timesteps": "1000"}, "timesteps", "must be a list"),
        (
            {"timesteps": [1000, 500], "num_inference_steps": 3},
            "timesteps",
            "has 2 steps.*num_inference_steps is 3",
        ),
        ({"context_timestep": -1}, "context_timestep", "finite and in"),
        ({"context_timestep": 1001}, "context_timestep", r"finite and in \[0, 1000\]"),
        ({"guidance_scale_2": 3.0}, "guidance_scale_2", "has one transformer"),
        ({"image": "seeded"}, "image", "makes video from text"),
    ],
)
def test_what_is_wrong(given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words) as error:
        PipelineConfig.model_validate({**BASE, "generation": given})
    (line,) = error.value.errors()
    assert line["loc"][:2] == ("generation", field)


@pytest.mark.parametrize("family", ["wan", "minimax_h3"])
def test_other_families_name_the_one_with_chunks(family: str) -> None:
    with pytest.raises(
        ConfigError, match=r"not chunk by chunk. Leave it out, or choose pipeline: wan_causal"
    ):
        load_pipeline({"pipeline": family, "model": "m", "generation": {"chunk_frames": 3}}, environ={})
    with pytest.raises(ConfigError, match=r"keep no KV cache.*those that keep one: wan_causal"):
        load_pipeline({"pipeline": family, "model": "m", "cudagraph_mode": "FULL"}, environ={})
