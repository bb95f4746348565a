"""Wan22Pipeline gives the latents that diffusers' own pipelines give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from omni_attn.errors import MetadataError
from omni_attn.models.wan import pipeline as pipeline_module
from omni_attn.models.wan.conditions import ImageCondition, PromptEmbeddings
from omni_attn.models.wan.config import WanConfig
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.pipeline import Wan22Pipeline
from tests.models.wan.tiny_checkpoints import (
    CLIP_TOKENS,
    FRAMES,
    HEIGHT,
    LATENT,
    WIDTH,
    Z,
    build_pipeline,
    build_scheduler,
    build_transformer,
)

STEPS = 4
SIZE = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES, "num_inference_steps": STEPS}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prompts(batch: int = 1, tokens: int = 20) -> PromptEmbeddings:
    return PromptEmbeddings(noise(batch, tokens, 32, seed=1), noise(batch, tokens, 32, seed=2))


def ours(transformer: Any) -> WanModel:
    """Our model with a diffusers transformer's weights."""
    model = WanModel(WanConfig.from_dict(transformer.config)).eval()
    model.load_state_dict(transformer.state_dict())
    return model


def pipeline_like(theirs: Any) -> Wan22Pipeline:
    """Ours with the weights, experts and kind of scheduler of one of diffusers'."""
    second = theirs.transformer_2
    return Wan22Pipeline(
        transformer=ours(theirs.transformer),
        scheduler=type(theirs.scheduler).from_config(theirs.scheduler.config),
        transformer_2=None if second is None else ours(second),
        boundary_ratio=theirs.config.boundary_ratio,
        expand_timesteps=theirs.config.expand_timesteps,
    )


def their_latents(theirs: Any, latents: Tensor, prompt: PromptEmbeddings, **options: Any) -> Tensor:
    return theirs(
        prompt_embeds=prompt.positive,
        negative_prompt_embeds=prompt.negative,
        latents=latents,
        output_type="latent",
        **SIZE,
        **options,
    ).frames


def assert_equal(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert expected.std() > 0.3  # a comparison of zeros would prove nothing
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["t2v", "two_experts", "ti2v"])
@pytest.mark.parametrize("scale", [5.0, 1.0])
def test_text_to_video(kind: str, scale: float) -> None:
    theirs, latents = build_pipeline(kind), noise(2, Z, *LATENT)
    expected = their_latents(theirs, latents, prompts(2), guidance_scale=scale)
    found = pipeline_like(theirs)(prompts(2), latents, num_inference_steps=STEPS, guidance_scale=scale)
    assert_equal(found, expected)


def test_each_expert_has_its_own_scale() -> None:
    theirs, latents = build_pipeline("two_experts"), noise(1, Z, *LATENT)
    expected = their_latents(theirs, latents, prompts(), guidance_scale=4.0, guidance_scale_2=2.0)
    found = pipeline_like(theirs)(
        prompts(), latents, num_inference_steps=STEPS, guidance_scale=4.0, guidance_scale_2=2.0
    )
    assert_equal(found, expected)


def test_another_scheduler() -> None:
    theirs, latents = build_pipeline("t2v"), noise(1, Z, *LATENT)
    theirs.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    expected = their_latents(theirs, latents, prompts())
    assert_equal(pipeline_like(theirs)(prompts(), latents, num_inference_steps=STEPS), expected)


@torch.inference_mode()
def encoded(vae: Any, video: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (vae.encode(video).latent_dist.mode() - mean) / std


def test_ti2v_continues_a_picture() -> None:
    theirs, latents, picture = build_pipeline("ti2v_image", with_vae=True), noise(1, Z, *LATENT), _picture()
    expected = their_latents(theirs, latents, prompts(), image=picture)
    condition = ImageCondition(encoded(theirs.vae, picture[:, :, None] * 2 - 1))
    found = pipeline_like(theirs)(prompts(), latents, num_inference_steps=STEPS, condition=condition)
    assert_equal(found, expected)
    assert torch.equal(found[:, :, :1], condition.latents)


@pytest.mark.parametrize("kind", ["i2v", "flf2v", "i2v_2.2"])
def test_image_to_video(kind: str) -> None:
    prompt = prompts(tokens=512)  # diffusers takes the last 512 rows of the context for text
    theirs, latents = build_pipeline(kind, with_vae=True), noise(1, Z, *LATENT)
    first, last = _picture(), _picture(seed=9) if kind == "flf2v" else None
    options: dict[str, Any] = {"image": first}
    image_embeds = None
    if kind != "i2v_2.2":
        image_embeds = noise(2 if kind == "flf2v" else 1, CLIP_TOKENS, 6, seed=6)
        options["image_embeds"] = image_embeds
        # diffusers lets a person give either, and needs both here: the picture for the VAE.
        theirs.check_inputs = lambda *_: None
    if last is not None:
        options["last_image"] = last
    expected = their_latents(theirs, latents, prompt, **options)

    video = torch.zeros(1, 3, FRAMES, HEIGHT, WIDTH)
    known = torch.zeros(1, Z, *LATENT)  # as many mask channels as pixel frames per latent frame, which is 4
    video[:, :, 0], known[:, :, 0] = first * 2 - 1, 1
    if last is not None:
        video[:, :, -1], known[:, -1, -1] = last * 2 - 1, 1
    condition = ImageCondition(encoded(theirs.vae, video), known, image_embeds)
    found = pipeline_like(theirs)(prompt, latents, num_inference_steps=STEPS, condition=condition)
    assert_equal(found, expected)


def _picture(seed: int = 8) -> Tensor:
    return torch.rand(1, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_a_batch_equals_its_videos_one_by_one() -> None:
    pipeline, latents = pipeline_like(build_pipeline("ti2v")), noise(2, Z, *LATENT)
    condition = ImageCondition(noise(1, Z, 1, *LATENT[1:], seed=4))
    together = pipeline(prompts(), latents, num_inference_steps=2, condition=condition)
    for index in range(2):
        alone = pipeline(prompts(), latents[index : index + 1], num_inference_steps=2, condition=condition)
        torch.testing.assert_close(together[index : index + 1], alone, rtol=1e-5, atol=1e-5)


def test_records_say_where_in_the_schedule_a_step_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = pipeline_module.prepare_attention

    def prepare(model: Any, records: Any, lengths: Any) -> None:
        seen.append((records, lengths))
        real(model, records, lengths=lengths)

    monkeypatch.setattr(pipeline_module, "prepare_attention", prepare)
    pipeline = pipeline_like(build_pipeline("t2v"))
    pipeline(prompts(), noise(1, Z, *LATENT), num_inference_steps=STEPS)
    assert len(seen) == STEPS  # once for both forwards of a guided step
    for index, (records, lengths) in enumerate(seen):
        assert {role: (r.step, r.num_steps) for role, r in records.items()} == dict.fromkeys(
            ("self", "cross"), (index, STEPS)
        )
        assert records["self"].sigma == pytest.approx(float(pipeline.scheduler.sigmas[index]))
        assert records["self"].vsa_dit_seq_shape == (3, 2, 3)
        assert lengths == {"self": (18, 18), "cross": (18, 20)}


def test_an_unchanged_grid_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_like(build_pipeline("two_experts"))
    builders = {
        layer.selection.backend_cls.get_builder_cls()
        for layer in pipeline.transformer.modules()
        if getattr(layer, "selection", None) is not None
    }
    built: list[Any] = []
    for builder in builders:
        real = builder.build

        def build(self: Any, record: Any, lengths: Any, real: Any = real) -> Any:
            built.append(lengths)
            return real(self, record, lengths)

        monkeypatch.setattr(builder, "build", build)
    pipeline(prompts(), noise(1, Z, *LATENT), num_inference_steps=STEPS)
    assert sorted(built) == [(18, 18), (18, 20)]  # self and cross, for all steps and both experts


@pytest.mark.parametrize(("scale", "forwards"), [(1.0, 1), (0.0, 1), (1.5, 2)])
def test_guidance_costs_a_forward_only_above_one(scale: float, forwards: int) -> None:
    pipeline = pipeline_like(build_pipeline("t2v"))
    calls: list[object] = []
    pipeline.transformer.register_forward_hook(lambda *_: calls.append(None))
    pipeline(prompts(), noise(1, Z, *LATENT), num_inference_steps=STEPS, guidance_scale=scale)
    assert len(calls) == forwards * STEPS


def test_progress_wraps_the_steps() -> None:
    seen: list[Any] = []

    def progress(items: Any, total: int, description: str) -> Any:
        seen.append((total, description))
        return items

    pipeline_like(build_pipeline("t2v"))(
        prompts(), noise(1, Z, *LATENT), num_inference_steps=STEPS, progress=progress
    )
    assert seen == [(STEPS, "denoising")]


ERRORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "scale of an expert that is not there": ("t2v", {"guidance_scale_2": 3.0}, "one transformer"),
    "guidance without a negative prompt": ("t2v", {"prompt": PromptEmbeddings(noise(1, 20, 32))}, "negative"),
    "a picture for text-to-video": (
        "t2v",
        {"condition": ImageCondition(noise(1, Z, *LATENT))},
        "text-to-video transformer",
    ),
    "latents of another model": ("t2v", {"latents": noise(1, 7, *LATENT)}, r"\[1, 7, 3, 4, 6\]"),
    "latents that patches do not divide": ("t2v", {"latents": noise(1, Z, 3, 4, 5)}, r"\(3, 4, 5\)"),
    "no picture for image-to-video": ("i2v_2.2", {}, "12 channels, 8 of them"),
    "no mask": ("i2v_2.2", {"condition": ImageCondition(noise(1, Z, *LATENT))}, "4 channels .* need 8"),
    "image tokens without a branch": (
        "i2v_2.2",
        {"condition": ImageCondition(noise(1, 2 * Z, *LATENT), image_embeds=noise(1, 5, 6))},
        "no image branch",
    ),
    "a whole clip for a first frame": (
        "ti2v",
        {"condition": ImageCondition(noise(1, Z, *LATENT))},
        r"\[3, 4, 6\]; .* \[1, 4, 6\]",
    ),
    "three prompts for two videos": (
        "t2v",
        {"prompt": prompts(3), "latents": noise(2, Z, *LATENT)},
        "for 2 videos",
    ),
}


@pytest.mark.parametrize(("kind", "changes", "text"), ERRORS.values(), ids=ERRORS)
def test_inputs_that_do_not_fit(kind: str, changes: dict[str, Any], text: str) -> None:
    pipeline = pipeline_like(build_pipeline(kind))
    arguments = {"prompt": prompts(), "latents": noise(1, Z, *LATENT), "num_inference_steps": 1} | changes
    with pytest.raises(MetadataError, match=text):
        pipeline(**arguments)


def test_two_experts_need_a_boundary() -> None:
    model = ours(build_transformer("t2v"))
    with pytest.raises(MetadataError, match=r"boundary_ratio is 0\.9 and transformer_2 is absent"):
        Wan22Pipeline(model, build_scheduler(), boundary_ratio=0.9)
