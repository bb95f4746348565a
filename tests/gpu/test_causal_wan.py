"""Causal Wan on a GPU: chunks as on the CPU, CUDA graphs with the same bits, and no wait for the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from omni_attn.errors import BackendImportError, BackendRejectedError
from omni_attn.models.checkpoint import resolve_float
from omni_attn.models.wan.causal import CachePlan, CausalVideo, CausalWanModel, CausalWanPipeline
from omni_attn.models.wan.conditions import PromptEmbeddings
from omni_attn.models.wan.dmd import build_dmd_scheduler
from omni_attn.models.wan.loading import keeps_float32
from omni_attn.models.wan.presets import WAN_PRESETS
from omni_attn.models.wan.seeded import materialise_seeded
from omni_attn.selector import use_attention_config
from tests.gpu.machine import on_gpu

pytestmark = on_gpu

TIMESTEPS = (1000.0, 700.0, 350.0)
TWO_HEADS = {"num_attention_heads": 2, "attention_head_dim": 128}
BACKENDS = ("TORCH_SDPA", "TRITON_ATTN", "FLASH_ATTN", "FLASHINFER_ATTN")


def pipeline_of(backend: str | None, device: str, dtype: str) -> CausalWanPipeline:
    """A window that forgets, on the same seeded weights everywhere."""
    config = dataclasses.replace(WAN_PRESETS["wan-tiny"].transformer, **TWO_HEADS)
    plan = CachePlan(frame_tokens=96, window_frames=5, sink_frames=1, block_size=8, dtype=dtype)
    chosen: Any = None if backend is None else {"default": backend}
    try:
        with use_attention_config(chosen, device=device, dtype=dtype), torch.device("meta"):
            model = CausalWanModel(config, plan, is_dmd=True)
    except (BackendRejectedError, BackendImportError) as refusal:
        pytest.skip(f"{backend}: {refusal}")
    # The same numbers in each dtype: which random ones a dtype draws differs between versions of torch.
    materialise_seeded(model, torch.Generator().manual_seed(0), "float32")
    for name, parameter in model.named_parameters():
        if not keeps_float32(name):
            parameter.data = parameter.data.to(resolve_float(dtype))
    return CausalWanPipeline(model.to(device), build_dmd_scheduler(12.0), timesteps=TIMESTEPS)


def inputs(device: str) -> tuple[PromptEmbeddings, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    text, negative = torch.randn(2, 1, 512, 64, generator=generator)
    noise = torch.randn(1, 16, 11, 16, 24, generator=generator)
    return PromptEmbeddings(text, negative), noise.to(device)


def stream(pipeline: CausalWanPipeline, device: str, **options: Any) -> torch.Tensor:
    prompt, noise = inputs(device)
    return pipeline(prompt, noise, generator=torch.Generator().manual_seed(2), **options).cpu()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, of the whole."""
    return float((found.cpu() - wanted.cpu()).norm() / wanted.norm())


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TRITON_ATTN"])
def test_a_video_is_that_of_the_cpu(backend: str) -> None:
    """In float32: what a sampler makes of bfloat16 goes its own way."""
    wanted = stream(pipeline_of("TORCH_SDPA", "cpu", "float32"), "cpu")
    assert error(stream(pipeline_of(backend, "cuda", "float32"), "cuda"), wanted) < 2e-2


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_chunks_are_those_of_the_cpu(backend: str | None) -> None:
    wanted, rounded = (said(pipeline_of("TORCH_SDPA", "cpu", dtype)) for dtype in ("float32", "bfloat16"))
    assert error(said(pipeline_of(backend, "cuda", "bfloat16")), wanted) < 1.5 * error(rounded, wanted)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_graph_gives_what_eager_steps_give(backend: str | None, scale: float) -> None:
    """What the model says of the same three chunks; a sampler would go on from any difference.

    A graph is planned for the longest history, so that a kernel may sum in another order.
    """
    pipeline = pipeline_of(backend, "cuda", "bfloat16")
    eager, replayed = (said(pipeline, scale, mode) for mode in ("NONE", "FULL_DECODE_ONLY"))
    assert error(replayed, eager) < 4e-2  # bfloat16 alone is 6e-2 away from float32


def said(pipeline: CausalWanPipeline, scale: float = 1.0, mode: str = "NONE") -> torch.Tensor:
    """What the model says of three chunks; skips a backend without graphs that is asked for one."""
    device = next(pipeline.transformer.parameters()).device.type
    prompt, noise = inputs(device)
    video = pipeline.start(prompt, num_frames=11, guidance_scale=scale, cudagraph_mode=mode)
    graphs = video.stepper.decision.final.has_full_cudagraphs()
    if mode != "NONE" and not graphs:
        pytest.skip(str(video.stepper.decision))
    with torch.inference_mode():
        found = torch.cat([velocity(video, noise[:, :, at : at + 3]) for at in (0, 3, 6)], dim=2)
    assert video.stepper.replays == (3 if graphs else 0)
    return found


def velocity(video: CausalVideo, latents: torch.Tensor) -> torch.Tensor:
    """What the model says of the next chunk, which becomes history as it is."""
    model = video.stepper.model
    batch = torch.cat([latents] * len(video.cache.streams)).to(model.dtype)
    video.cache.open(latents.shape[2])
    rope = model.rope((3, 8, 12), video.first_frame)
    time = torch.full((len(batch),), 500.0, device=batch.device)
    answer = video.stepper.velocity(batch, time, rope).clone().float()  # the next call may write there
    video.cache.commit()
    return answer


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_forwards_of_a_chunk_do_not_wait_for_the_device(mode: str) -> None:
    pipeline = pipeline_of("TRITON_ATTN", "cuda", "bfloat16")
    prompt, noise = inputs("cuda")
    video = pipeline.start(prompt, num_frames=None, cudagraph_mode=mode)
    model, generator = pipeline.transformer, torch.Generator().manual_seed(2)
    video.denoise(noise[:, :, :3], generator=generator)  # compiles, and captures
    rope = model.rope((3, 8, 12), video.first_frame)
    latents, time = noise[:, :, 3:6].to(model.dtype), torch.full((1,), 500.0, device="cuda")
    with torch.inference_mode():
        torch.cuda.set_sync_debug_mode("error")
        try:
            video.cache.open(3)
            for _ in range(3):
                video.stepper.velocity(latents, time, rope)
            video.cache.commit()
        finally:
            torch.cuda.set_sync_debug_mode("default")
