"""Streaming against the algorithm in plain words, guidance, known frames, CUDA-graph modes, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from omni_attn.errors import ConfigError, KVCacheError, MetadataError
from omni_attn.facts.kv_cache import AttentionCGSupport
from omni_attn.models.wan.causal import CachePlan, CausalWanModel, CausalWanPipeline
from omni_attn.models.wan.conditions import PromptEmbeddings
from omni_attn.models.wan.dmd import build_dmd_scheduler
from tests.models.wan.causal.small import (
    CHANNELS,
    FRAME,
    HEIGHT,
    TEXT,
    WIDTH,
    causal_model,
    masked_model,
    plan_of,
    random,
)

SHIFT, TIMESTEPS = 12.0, (1000.0, 700.0, 350.0)
PROMPT = PromptEmbeddings(random(1, TEXT, 32, seed=1), random(1, TEXT, 32, seed=2))


def distilled(plan: CachePlan, **options: Any) -> CausalWanPipeline:
    return CausalWanPipeline(
        causal_model(plan, is_dmd=True), build_dmd_scheduler(SHIFT), timesteps=TIMESTEPS, **options
    )


def noise(frames: int, batch: int = 1) -> Tensor:
    return random(batch, CHANNELS, frames, HEIGHT, WIDTH, seed=3)


def drawn(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def level(timestep: float) -> float:
    """Of the nearest step among 1000 evenly spaced ones, shifted."""
    levels = [SHIFT * (step / 1000) / (1 + (SHIFT - 1) * (step / 1000)) for step in range(1, 1001)]
    return min(levels, key=lambda level: abs(1000 * level - timestep))


@torch.no_grad()
def in_plain_words(
    plan: CachePlan, whole: Tensor, generator: torch.Generator, context: float = 0.0, scale: float = 1.0
) -> Tensor:
    """The whole video in every forward, under a mask; frames before a chunk are clean and at the context's time."""
    batch, frames = whole.shape[0], whole.shape[2]
    video, model = torch.zeros_like(whole), masked_model(plan, frames)
    levels = [*map(level, TIMESTEPS), 0.0]
    for begin in range(0, frames, plan.chunk_frames):
        part = slice(begin, min(begin + plan.chunk_frames, frames))
        sample = whole[:, :, part].double()
        for index, timestep in enumerate(TIMESTEPS):
            video[:, :, part] = sample.float()
            times = torch.full((batch, frames * FRAME), context)
            times[:, part.start * FRAME : part.stop * FRAME] = timestep
            velocity = model(video, times, PROMPT.positive.expand(batch, -1, -1))[:, :, part].double()
            if scale > 1:
                assert PROMPT.negative is not None
                unguided = model(video, times, PROMPT.negative.expand(batch, -1, -1))[:, :, part].double()
                velocity = unguided + scale * (velocity - unguided)
            clean = sample - levels[index] * velocity
            fresh = torch.randn(sample.shape, generator=generator).double()
            sample = (1 - levels[index + 1]) * clean + levels[index + 1] * fresh
        video[:, :, part] = sample.float()
    return video


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_DECODE_ONLY"])
@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"window_frames": 3, "sink_frames": 1}, {"context": 20.0}),
        ({"window_frames": 2}, {"scale": 3.0}),
    ],
)
def test_chunks_are_what_the_algorithm_says(
    changes: dict[str, int], options: dict[str, float], mode: str
) -> None:
    plan, whole = plan_of(**changes), noise(7, batch=2)
    pipeline = distilled(plan, context_timestep=options.get("context", 0.0))
    found = pipeline(
        PROMPT, whole, guidance_scale=options.get("scale", 1.0), generator=drawn(), cudagraph_mode=mode
    )
    wanted = in_plain_words(plan, whole, drawn(), **options)
    assert found.dtype == torch.float32 and wanted.std() > 0.3  # a comparison of zeros would prove nothing
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_a_graph_serves_every_forward_of_whole_chunks() -> None:
    pipeline = distilled(plan_of(window_frames=3, sink_frames=1))
    video = pipeline.start(PROMPT, num_frames=None, cudagraph_mode="FULL", debug=True)
    for chunks in (1, 2, 3, 4):
        video.denoise(noise(2), generator=drawn())  # debug holds each replay against an eager forward
        assert video.stepper.replays == chunks * (len(TIMESTEPS) + 1)
    video.denoise(noise(1), generator=drawn())  # shorter: eagerly
    assert video.stepper.replays == 4 * (len(TIMESTEPS) + 1) and video.first_frame == 9
    assert video.stepper.decision.final.name == "FULL"


def test_a_mode_that_no_backend_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "omni_attn.models.wan.causal.stepping.cudagraph_supports",
        lambda _: {"SLOW_ATTN": AttentionCGSupport.NEVER},
    )
    with pytest.raises(ConfigError, match="is not supported with SLOW_ATTN"):
        distilled(plan_of()).start(PROMPT, num_frames=2, cudagraph_mode="FULL")


def test_chunks_come_one_by_one_and_the_bar_counts_their_steps() -> None:
    counted: list[int] = []

    def progress(items: Any, total: int, description: str) -> Iterator[Any]:
        assert (total, description) == (3 * len(TIMESTEPS), "denoising")
        for item in items:
            counted.append(item)
            yield item
        counted.append(-1)

    chunks = distilled(plan_of()).stream(PROMPT, noise(5), generator=drawn(), progress=progress)
    assert not counted
    shapes = []
    for number, chunk in enumerate(chunks, 1):
        assert len(counted) == number * len(TIMESTEPS)
        shapes.append(chunk.shape[2])
    assert shapes == [2, 2, 1] and counted[-1] == -1


def test_known_frames_are_gone_on_from() -> None:
    plan, pipeline = plan_of(), distilled(plan_of())
    first, last = pipeline.stream(PROMPT, noise(4), generator=drawn())
    generator = drawn()
    for _ in range(len(TIMESTEPS)):  # what the first chunk drew
        torch.randn(first.shape, generator=generator)
    again = pipeline(PROMPT, noise(4)[:, :, 2:], known=first, generator=generator)
    torch.testing.assert_close(again, last, rtol=1e-5, atol=1e-5)
    alone = pipeline(PROMPT, noise(4)[:, :, 2:], generator=drawn(9))
    assert plan.chunk_frames == alone.shape[2] and not torch.allclose(alone, last, atol=0.1)


def test_a_video_without_an_end_takes_the_room_of_its_window() -> None:
    pipeline = distilled(plan_of(window_frames=4, sink_frames=1))
    endless = pipeline.start(PROMPT, num_frames=None)
    parts = [endless.denoise(noise(2), generator=drawn(seed)) for seed in range(6)]
    bounded = pipeline.start(PROMPT, num_frames=12)
    for seed, part in enumerate(parts):
        assert torch.equal(bounded.denoise(noise(2), generator=drawn(seed)), part)
    sizes = [sum(pages.numel() for pages in video.cache.kv_caches.values()) for video in (endless, bounded)]
    assert sizes[0] == sizes[1]
    short = pipeline.start(PROMPT, num_frames=2)
    short.denoise(noise(2), generator=drawn())
    with pytest.raises(KVCacheError, match="overflows its row"):
        short.denoise(noise(2), generator=drawn())


def test_a_chunk_that_broke_off_can_be_made_again() -> None:
    pipeline = distilled(plan_of(window_frames=3, sink_frames=1))
    wanted = list(pipeline.stream(PROMPT, noise(4), generator=drawn()))
    video, generator = pipeline.start(PROMPT, num_frames=4), drawn()
    first = video.denoise(noise(4)[:, :, :2], generator=generator)
    state = generator.get_state()
    with pytest.raises(StopIteration):
        video.denoise(noise(4)[:, :, 2:], generator=generator, each_step=iter([0]))
    generator.set_state(state)
    again = video.denoise(noise(4)[:, :, 2:], generator=generator)
    assert torch.equal(first, wanted[0]) and torch.equal(again, wanted[1])


def test_other_schedulers_begin_anew_with_each_chunk() -> None:
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipeline = CausalWanPipeline(causal_model(plan_of()), scheduler)
    first, last = pipeline.stream(PROMPT, noise(4), num_inference_steps=4)
    alone = pipeline(PROMPT, noise(4)[:, :, :2], num_inference_steps=4)
    again = pipeline(PROMPT, noise(4)[:, :, 2:], known=first, num_inference_steps=4)
    assert torch.equal(first, alone)
    torch.testing.assert_close(again, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"latents": noise(2)[0]}, r"latents have shape \[4, 2, 4, 6\]"),
        ({"latents": noise(2)[:, :3]}, r"this video needs \[1, 4, frames, height, width\]"),
        (
            {"latents": noise(2)[..., :4]},
            "have 2 x 2 tokens a frame, and the transformer was built for frames of 6",
        ),
        ({"latents": noise(2)[..., :5]}, "latents of 4 x 5"),
        ({"latents": noise(2, batch=3), "prompt": PromptEmbeddings(random(2, TEXT, 32))}, "for 3 videos"),
        (
            {"guidance_scale": 2.0, "prompt": PromptEmbeddings(PROMPT.positive)},
            "compares with a negative prompt",
        ),
        ({"prompt": PromptEmbeddings(random(1, TEXT, 8))}, r"this model needs \[streams, text tokens, 32\]"),
        ({"prompt": PromptEmbeddings(random(1, 0, 32))}, "at least one row"),
    ],
)
def test_what_does_not_fit(call: dict[str, Any], text: str) -> None:
    arguments = {"prompt": PROMPT, "latents": noise(2), "generator": drawn()} | call
    with pytest.raises(MetadataError, match=text):
        distilled(plan_of())(**arguments)


def test_all_chunks_of_a_video_have_one_size() -> None:
    video = distilled(plan_of()).start(PROMPT, num_frames=4)
    video.denoise(noise(2), generator=drawn())
    with pytest.raises(MetadataError, match="latents of 6 x 4 came after frames of 4 x 6"):
        video.denoise(noise(2).transpose(3, 4), generator=drawn())


def test_a_distilled_transformer_needs_its_steps() -> None:
    model = causal_model(plan_of(), is_dmd=True)
    with pytest.raises(MetadataError, match="timesteps is None: give those it was distilled for"):
        CausalWanPipeline(model, build_dmd_scheduler(SHIFT))
    with pytest.raises(MetadataError, match="timesteps came with UniPCMultistepScheduler"):
        CausalWanPipeline(model, UniPCMultistepScheduler(), timesteps=TIMESTEPS)


def test_a_model_runs_in_another_dtype() -> None:
    plan = plan_of(dtype="bfloat16", cache_dtype="fp8_e4m3")
    model: CausalWanModel = causal_model(plan, is_dmd=True).to(torch.bfloat16)
    pipeline = CausalWanPipeline(model, build_dmd_scheduler(SHIFT), timesteps=TIMESTEPS)
    found = pipeline(PROMPT, noise(4), generator=drawn())
    assert found.dtype == torch.float32 and found.isfinite().all()
