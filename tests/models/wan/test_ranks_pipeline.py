"""Whole loops among ranks equal those of one process; and inputs that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler
from torch import Tensor

from omni_attn.errors import MetadataError
from omni_attn.models.wan.conditions import ImageCondition, PromptEmbeddings
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.dmd import build_dmd_scheduler
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.pipeline import Wan22Pipeline
from omni_attn.parallel import Parallel
from omni_attn.parallel.dispatch import STRATEGIES
from omni_attn.testing import fake_ranks
from tests.models.wan.ranks import DEGREES, on_cpu
from tests.models.wan.tiny_checkpoints import build_scheduler
from tests.models.wan.tiny_models import BASE, KINDS, build_model, seed_weights

LATENT = (3, 4, 6)
PIPELINES: dict[str, dict[str, Any]] = {
    "t2v": {},
    "two experts": {"experts": 2},
    "distilled": {"is_dmd": True},
    "ti2v with a picture": {"kind": "ti2v", "condition": (1, None, None)},
    "i2v": {"kind": "i2v", "condition": (3, 1, 7)},
    "flf2v": {"kind": "flf2v", "condition": (3, 1, 10)},
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sample(
    kind: str = "t2v",
    *,
    experts: int = 1,
    is_dmd: bool = False,
    condition: tuple[int, int | None, int | None] | None = None,
    scheduler: Any = None,
    latents: Tensor | None = None,
    negative: bool = True,
    **options: Any,
) -> Tensor:
    """Latents of a tiny pipeline that is built here."""

    def expert(seed: int) -> WanModel:
        model = WanModel(WanConfig(**(BASE | KINDS[kind])), is_dmd=is_dmd).eval()
        seed_weights(model, seed)
        return model

    models = on_cpu(lambda: [expert(seed) for seed in range(experts)])
    if scheduler is None:
        scheduler = build_dmd_scheduler() if is_dmd else build_scheduler()
    pipeline = Wan22Pipeline(
        models[0],
        scheduler,
        models[1] if experts == 2 else None,
        0.8 if experts == 2 else None,
        expand_timesteps=kind == "ti2v",
    )
    given = None
    if condition is not None:
        frames, mask, embeds = condition
        given = ImageCondition(
            noise(1, 4, frames, *LATENT[1:], seed=4),
            None if mask is None else noise(1, mask, *LATENT, seed=5),
            None if embeds is None else noise(1, embeds, 6, seed=6),
        )
    steps = {} if is_dmd else {"num_inference_steps": 4}
    prompt = PromptEmbeddings(noise(1, 20, 32, seed=1), noise(1, 20, 32, seed=2) if negative else None)
    start = noise(1, 4, *LATENT, seed=3) if latents is None else latents
    return pipeline(prompt, start, condition=given, **(steps | options))


@pytest.mark.parametrize("degrees", DEGREES, ids=STRATEGIES)
@pytest.mark.parametrize("options", PIPELINES.values(), ids=PIPELINES)
def test_a_whole_loop_equals_that_of_one_process(options: dict[str, Any], degrees: dict[str, int]) -> None:
    def run(_: Parallel | None = None) -> Tensor:
        return sample(**options, generator=torch.Generator().manual_seed(7))

    alone = run()
    assert alone.std() > 0.3  # a comparison of zeros would prove nothing
    first, *others = fake_ranks(degrees, run)
    torch.testing.assert_close(first, alone, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(other, first) for other in others)


DIFFERENT: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "noise": (lambda rank: {"latents": noise(1, 4, *LATENT, seed=rank)}, "latents differs"),
    "batch": (lambda rank: {"latents": noise(1 + rank, 4, *LATENT)}, "latents differs"),
    "steps": (lambda rank: {"num_inference_steps": 3 + rank}, "num_inference_steps differs"),
    "guidance": (lambda rank: {"guidance_scale": 1.0 + rank}, "guidance_scale differs"),
    "seeds": (
        lambda rank: {"is_dmd": True, "generator": torch.Generator().manual_seed(rank)},
        "generator differs",
    ),
    "a latent that one rank would refuse": (
        lambda rank: {"latents": noise(1, 4 + rank, *LATENT)},
        "latents differs",
    ),
    "a prompt that one rank would refuse": (
        lambda rank: {"guidance_scale": 5.0 if rank else 1.0, "negative": not rank},
        "guidance_scale differs",
    ),
    "flow shift": (
        lambda rank: {"scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0 + rank)},
        "scheduler differs",
    ),
}


@pytest.mark.parametrize(("options", "text"), DIFFERENT.values(), ids=DIFFERENT)
def test_inputs_that_differ_between_ranks(options: Callable[[int], dict[str, Any]], text: str) -> None:
    def work(parallel: Parallel) -> None:
        with pytest.raises(MetadataError, match=rf"{text} between the 2 ranks .* rank 1 from rank 0"):
            sample(**options(parallel.rank))

    fake_ranks({"ulysses_degree": 2}, work)


@pytest.mark.parametrize("scheduler", [FlowMatchEulerDiscreteScheduler, build_scheduler])
def test_a_generator_that_is_not_drawn_from_may_differ(scheduler: Callable[[], Any]) -> None:
    def work(parallel: Parallel) -> Tensor:
        generator = torch.Generator().manual_seed(parallel.rank)
        return sample(scheduler=scheduler(), generator=generator)

    first, second = fake_ranks({"ulysses_degree": 2}, work)
    assert torch.equal(first, second)


def test_noise_of_no_generator_is_compared_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)])
    monkeypatch.setattr(torch, "get_rng_state", lambda: next(states))

    def work(_: Parallel) -> None:
        with pytest.raises(MetadataError, match="generator differs"):
            sample(scheduler=FlowMatchLCMScheduler())

    fake_ranks({"ulysses_degree": 2}, work)


def test_two_experts_among_different_ranks() -> None:
    alone = build_model("t2v")

    def work(_: Parallel) -> None:
        with pytest.raises(MetadataError, match=r"transformer and transformer_2 .* different ranks"):
            Wan22Pipeline(on_cpu(lambda: build_model("t2v")), build_scheduler(), alone, 0.8)

    fake_ranks({"ulysses_degree": 2}, work)
