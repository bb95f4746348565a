"""Presets and checkpoint folders of wan_causal: what they were made for, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_attn.config import WanCausalGenerationConfig
from omni_attn.errors import ConfigError
from omni_attn.models.wan.causal import CausalWanModel
from omni_attn.models.wan.causal.source import (
    CAUSAL_PRESETS,
    CAUSAL_TIMESTEPS,
    load_causal_source,
    settled_request,
)
from omni_attn.models.wan.source import load_source
from tests.models.wan.causal.small import plan_of
from tests.models.wan.tiny_checkpoints import build_pipeline

STEPS = "timesteps 1000, 850, 700, 550, 350, 275, 200, 125"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "checkpoint"
    build_pipeline("t2v").save_pretrained(folder)
    return folder


def changed(folder: Path, index: dict[str, Any], transformer: dict[str, Any], copy: Path) -> Path:
    """The folder with other entries in its files, and the same weights."""
    copy.mkdir()
    for part in folder.iterdir():
        (copy / part.name).symlink_to(part)
    for name, entries in (("model_index.json", index), ("transformer/config.json", transformer)):
        target = copy / name
        if name.startswith("transformer"):
            (copy / "transformer").unlink()
            (copy / "transformer").mkdir()
            for part in (folder / "transformer").iterdir():
                (copy / "transformer" / part.name).symlink_to(part)
        values = json.loads((folder / name).read_text()) | entries
        target.unlink()
        target.write_text(json.dumps(values))
    return copy


def request(**values: Any) -> WanCausalGenerationConfig:
    return WanCausalGenerationConfig.model_validate(values)


def test_presets_are_text_to_video_with_one_transformer() -> None:
    assert list(CAUSAL_PRESETS)[:2] == ["causal-wan2.1-t2v-1.3b", "causal-wan-tiny"]
    for name in CAUSAL_PRESETS:
        source = load_causal_source(name)
        assert len(source.wan.experts) == 1 and not source.wan.needs_image
        assert source.is_causal == name.startswith("causal-")
    assert load_causal_source("causal-wan-tiny").wan.flow_shift == 12.0
    with pytest.raises(ConfigError, match=r"wan2.2-t2v-a14b reads pictures or has two transformers"):
        load_causal_source("wan2.2-t2v-a14b")
    with pytest.raises(ConfigError, match="Did you mean 'causal-wan-tiny'"):
        load_causal_source("causal-wan-tyni")
    with pytest.raises(ConfigError, match="neither a preset nor a folder"):
        load_source("causal-wan-tiny")  # pipeline: wan makes whole videos


def test_a_distilled_causal_checkpoint_knows_its_steps_and_chunks(plain: Path, tmp_path: Path) -> None:
    chunks = {
        "num_frames_per_block": 2,
        "local_attn_size": 7,
        "sink_size": 1,
        "sliding_window_num_frames": 21,
    }
    names = {"_class_name": "CausalWanTransformer3DModel"}
    folder = changed(plain, {"_class_name": "WanCausalDMDPipeline"}, chunks | names, tmp_path / "causal")
    source = load_causal_source(str(folder))
    assert source.is_causal and source.timesteps == CAUSAL_TIMESTEPS and source.wan.flow_shift == 12.0
    settled, notes = settled_request(request(), source)
    assert (settled.chunk_frames, settled.window_frames, settled.sink_frames) == (2, 6, 1)
    assert (settled.timesteps, settled.num_inference_steps) == (CAUSAL_TIMESTEPS, 8)
    assert notes == (f"steps: {STEPS}, as {folder} was distilled for them",)
    own, notes = settled_request(request(chunk_frames=3, timesteps=[1000, 500]), source)
    assert (own.chunk_frames, own.window_frames, own.timesteps) == (3, None, (1000.0, 500.0))
    assert own.num_inference_steps == 2 and notes == ()
    model = CausalWanModel.from_pretrained(
        folder / "transformer", plan_of(), device="cpu", dtype=torch.float32
    )
    assert model.config == source.config
    with pytest.raises(ConfigError, match=r"chunk by chunk.*is pipeline: wan_causal"):
        load_source(str(folder))


def test_other_checkpoints_are_told_apart(plain: Path, tmp_path: Path) -> None:
    source = load_causal_source(str(plain))
    assert not source.is_causal and source.timesteps is None
    settled, notes = settled_request(request(), source)
    assert (settled.chunk_frames, settled.num_inference_steps) == (3, 8)
    assert notes == (f"chunks: {plain} was made for whole videos, and sees only what came before here",)
    distilled = changed(plain, {"_class_name": "WanDMDPipeline"}, {}, tmp_path / "dmd")
    assert load_causal_source(str(distilled)).timesteps == (1000.0, 757.0, 522.0)
    image = changed(plain, {"_class_name": "WanImageToVideoPipeline"}, {}, tmp_path / "image")
    with pytest.raises(ConfigError, match=r"runs WanCausalDMDPipeline, WanDMDPipeline, WanPipeline"):
        load_causal_source(str(image))


def test_two_transformers_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "two"
    build_pipeline("two_experts").save_pretrained(folder)
    with pytest.raises(ConfigError, match="has two transformers, and each would keep a cache of its own"):
        load_causal_source(str(folder))


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ({"num_frames_per_block": 0}, "num_frames_per_block is 0; it must be a positive integer"),
        ({"sink_size": -1}, "sink_size is -1"),
        ({"local_attn_size": 0}, "local_attn_size is 0; it must be a positive integer, or -1"),
    ],
)
def test_chunks_that_there_cannot_be(plain: Path, tmp_path: Path, chunks: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_causal_source(str(changed(plain, {}, chunks, tmp_path / "copy")))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_inference_steps": 4}, f"4, and causal-wan-tiny is distilled to 8 steps, at {STEPS}"),
        ({"guidance_scale": 5.0}, "guidance is distilled into causal-wan-tiny"),
    ],
)
def test_what_a_distilled_model_does_not_have(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settled_request(request(**values), load_causal_source("causal-wan-tiny"))
