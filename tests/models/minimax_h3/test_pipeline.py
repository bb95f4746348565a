"""The loop gives what diffusers' modular pipeline gives; conditions are held; nothing is made twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import (
    MiniMaxH3CoreDenoiseStep,
    MiniMaxH3FL2VACoreDenoiseStep,
)
from torch import Tensor

from omni_attn.config import AttentionConfig
from omni_attn.errors import ConfigError, MetadataError
from omni_attn.models.minimax_h3.attention.fastvideo_h3 import MiniMaxH3VSAMetadataBuilder
from omni_attn.models.minimax_h3.conditions import Keyframes, Prompt
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.models.minimax_h3.packing import ImageReference, VideoReference, pack_ref2va, pack_t2va
from omni_attn.models.minimax_h3.patches import audio_to_rows, patchify, unpatchify
from omni_attn.models.minimax_h3.pipeline import MiniMaxH3Pipeline
from omni_attn.models.minimax_h3.presets import MINIMAX_H3_PRESETS
from omni_attn.models.minimax_h3.schedule import FASTH3_V1_PLAN, MINIMAX_H3_PLAN
from omni_attn.models.minimax_h3.seeded import materialise_seeded
from omni_attn.selector import use_attention_config
from tests.models.minimax_h3.tiny_pipelines import (
    FRAMES,
    HEIGHT,
    LATENT,
    SOUNDS,
    TEXT_ROWS,
    WIDTH,
    build_transformer,
    noise,
    run_reference,
    text,
)

SIZE = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES}
SMALL = (7, 4, 6)  # latent frames, height and width where only our own results are compared


def pipeline(plan: Any = MINIMAX_H3_PLAN) -> MiniMaxH3Pipeline:
    return MiniMaxH3Pipeline.for_plan(build_transformer(), plan)


def small_noise(batch: int = 1) -> tuple[Tensor, Tensor]:
    video, audio = noise(batch, latent=SMALL)
    return video, audio[..., :9]


def frames(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, 24, 1, *LATENT[1:], generator=generator) for _ in range(count)]


def test_text_alone_as_in_diffusers() -> None:
    expected = run_reference(
        MiniMaxH3CoreDenoiseStep(),
        prompt_embeds=text(),
        text_token_tags=torch.ones(TEXT_ROWS, dtype=torch.int64),
        num_inference_steps=5,
        generator=torch.Generator().manual_seed(5),
        **SIZE,
    )
    found = pipeline()(Prompt(text()), *noise(), num_inference_steps=5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("anchors", [("first",), ("last",), ("first", "last")])
def test_keyframes_as_in_diffusers(anchors: tuple[str, ...]) -> None:
    given = frames(len(anchors))
    tags = torch.tensor([1, 0, 0, 1, 1, 1, 1])  # two rows that an encoder made of a picture
    expected = run_reference(
        MiniMaxH3FL2VACoreDenoiseStep(),
        prompt_embeds=text(),
        text_token_tags=tags,
        keyframe_anchors=anchors,
        condition_latents=given,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(5),
        **SIZE,
    )
    generator = torch.Generator().manual_seed(5)
    keyframes = Keyframes(**dict(zip(anchors, given, strict=True))).noised(generator)
    video = torch.randn(1, 24, *LATENT, generator=generator)
    rows = torch.randn(1, 2 * SOUNDS, 32, generator=generator)
    found = pipeline()(
        Prompt(text(), tags),
        video,
        rows.unflatten(1, (2, -1)).transpose(2, 3),
        keyframes=keyframes,
        num_inference_steps=4,
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_one_batch_is_many_videos() -> None:
    prompts = torch.cat([text(seed=1), text(seed=2)])
    video, audio = small_noise(2)
    together = pipeline()(Prompt(prompts), video, audio, num_inference_steps=3)
    for index in range(2):
        item = slice(index, index + 1)
        alone = pipeline()(Prompt(prompts[item]), video[item], audio[item], num_inference_steps=3)
        torch.testing.assert_close([part[item] for part in together], list(alone), rtol=1e-4, atol=1e-5)
    shared = pipeline()(Prompt(prompts[:1]), video, audio, num_inference_steps=3)
    torch.testing.assert_close(shared[0][:1], together[0][:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", [MINIMAX_H3_PLAN, FASTH3_V1_PLAN])
def test_native_padding_changes_nothing(plan: Any) -> None:
    video, audio = small_noise()
    expected = pipeline(plan)(Prompt(text()), video, audio, num_inference_steps=5)
    sequence = pack_t2va(TEXT_ROWS, SMALL, 9).padded(64)
    assert sequence.padded_len is not None
    rows = pipeline(plan).denoise_rows(
        sequence, text(), patchify(video), audio_to_rows(audio), num_inference_steps=5
    )
    torch.testing.assert_close(unpatchify(rows[0], sequence.grid), expected[0], rtol=1e-4, atol=1e-5)


def test_references_are_held_and_seen() -> None:
    references = (ImageReference((4, 4)), VideoReference((2, 4, 6), audio_latents=3))
    sequence = pack_ref2va(TEXT_ROWS, SMALL, 9, references)
    video, audio = small_noise()
    generator = torch.Generator().manual_seed(9)
    held_video = torch.randn(1, sequence.condition_video_rows, 96, generator=generator)
    held_audio = torch.randn(1, sequence.condition_audio_rows, 32, generator=generator)
    seen: list[tuple[Tensor, Tensor]] = []
    hook = build_transformer().register_forward_pre_hook(lambda _, given: seen.append(given[:2]))

    def made(conditions: Tensor) -> tuple[Tensor, Tensor]:
        return pipeline().denoise_rows(
            sequence,
            text(),
            torch.cat([conditions, patchify(video)], dim=1),
            torch.cat([held_audio, audio_to_rows(audio)], dim=1),
            num_inference_steps=4,
        )

    found = made(held_video)
    hook.remove()
    assert len(seen) == 3
    for video_rows, audio_rows in seen:
        assert torch.equal(video_rows[:, : sequence.condition_video_rows], held_video)
        assert torch.equal(audio_rows[:, : sequence.condition_audio_rows], held_audio)
    assert (found[0].shape, found[1].shape) == (patchify(video).shape, audio_to_rows(audio).shape)
    assert not torch.allclose(made(-held_video)[0], found[0])


def test_text_is_refined_once_and_layouts_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AttentionConfig.model_validate(
        {"per_role": {"self": {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": {"topk": 1}}}}
    )
    preset = MINIMAX_H3_PRESETS["fasth3-tiny"]
    with torch.device("meta"), use_attention_config(config, device="cpu", dtype="float32"):
        model = MiniMaxH3Model(preset.transformer)
    materialise_seeded(model, torch.Generator().manual_seed(0), "float32")
    calls = {"refined": 0, "built": 0}
    steps: list[tuple[int | None, int | None, float | None]] = []
    build = MiniMaxH3VSAMetadataBuilder.build

    def counted(self: Any, record: Any, lengths: Any) -> Any:
        calls["built"] += 1
        return build(self, record, lengths)

    monkeypatch.setattr(MiniMaxH3VSAMetadataBuilder, "build", counted)
    model.token_refiner.register_forward_hook(
        lambda *_: calls.update(refined=calls["refined"] + 1)  # type: ignore[func-returns-value]
    )
    model.transformer_blocks[0].attn.attention.register_forward_pre_hook(
        lambda _, given: steps.append((given[3].step, given[3].num_steps, given[3].sigma))
    )
    found = MiniMaxH3Pipeline.for_plan(model, preset.plan)(Prompt(text()), *small_noise())
    assert calls == {"refined": 1, "built": 1}
    assert [step for step, *_ in steps] == list(range(8))
    assert {count for _, count, _ in steps} == {8}
    levels = [sigma for *_, sigma in steps]
    u = 0.125
    assert levels[-1] == pytest.approx(10 * u / (1 + 9 * u))
    assert all(part.isfinite().all() for part in found)


@pytest.mark.parametrize(
    ("changes", "text_of"),
    [
        ({"latents": torch.zeros(1, 16, 7, 4, 6)}, r"\[1, 16, 7, 4, 6\].*\[batch, 24"),
        ({"audio_latents": torch.zeros(1, 1, 32, 9)}, r"\[1, 1, 32, 9\].*\[1, 2, 32, latents\]"),
        ({"audio_latents": torch.zeros(2, 2, 32, 9)}, r"\[2, 2, 32, 9\].* of 1 videos.*\[1, 2, 32"),
        ({"prompt": Prompt(torch.zeros(3, 5, 64))}, r"\[3, 5, 64\] was given for 1 videos"),
        ({"prompt": Prompt(torch.zeros(1, 5, 60))}, r"\[1, 5, 60\].*text\s+rows, 64"),
        ({"keyframes": Keyframes(torch.zeros(1, 24, 1, 4, 4))}, r"\[1, 24, 1, 4, 4\].*\[1, 24, 1, 4, 6\]"),
        ({"latents": torch.zeros(1, 24, 7, 5, 6)}, "height is 5"),
        ({"prompt": torch.zeros(5, 64)}, r"\[5, 64\].*text rows, 64"),
        (
            {"prompt": Prompt(torch.zeros(1, 5, 64), torch.ones(4))},
            r"prompt_embeds .*\[1, 5, 64\].*\[batch, 4, 64\]",
        ),
    ],
)
def test_what_does_not_fit_is_told_before_any_work(changes: dict[str, Any], text_of: str) -> None:
    video, audio = small_noise()
    given = {"prompt": Prompt(text()), "latents": video, "audio_latents": audio} | changes
    with pytest.raises(MetadataError, match=text_of):
        pipeline()(**given)


def test_rows_that_do_not_fit_a_sequence_are_named_as_they_came() -> None:
    sequence = pack_ref2va(5, SMALL, 9, [ImageReference((4, 6))])
    rows = {
        "prompt_embeds": torch.zeros(1, 5, 64),
        "video_rows": torch.zeros(1, 48, 96),
        "audio_rows": torch.zeros(1, 18, 32),
    }
    for name, given in rows.items():
        for wrong in (given[:, 1:], given[..., 1:], given[0]):
            with pytest.raises(MetadataError, match=rf"{name} has shape .*\[batch, {given.shape[1]}, "):
                pipeline().denoise_rows(sequence, **(rows | {name: wrong}))


def test_a_prompt_may_be_a_tensor() -> None:
    given = text()
    found = pipeline()(given, *small_noise(), num_inference_steps=2)
    expected = pipeline()(Prompt(given), *small_noise(), num_inference_steps=2)
    assert all(map(torch.equal, found, expected))


def test_points_of_a_distilled_grid_are_fixed() -> None:
    with pytest.raises(ConfigError, match=r"num_inference_steps is 8.*5 points"):
        pipeline(FASTH3_V1_PLAN)(Prompt(text()), *small_noise(), num_inference_steps=8)
