"""MiniMax-H3 over several ranks gives on each of them what it gives alone: any packing, any lengths, any mode."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from omni_attn import Attention, prepare_attention
from omni_attn.config import MiniMaxH3GenerationConfig, ParallelConfig
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.models.minimax_h3.conditions import Keyframes, Prompt
from omni_attn.models.minimax_h3.config import REFINER_ROLE
from omni_attn.models.minimax_h3.model import MiniMaxH3Model
from omni_attn.models.minimax_h3.needs import activation_allowance
from omni_attn.models.minimax_h3.packing import ImageReference, VideoReference, pack_ref2va, pack_t2va
from omni_attn.models.minimax_h3.patches import audio_to_rows, patchify
from omni_attn.models.minimax_h3.pipeline import MiniMaxH3Pipeline
from omni_attn.models.minimax_h3.source import load_source
from omni_attn.parallel import Parallel, use_parallel
from omni_attn.report import attention_report
from omni_attn.selector import use_attention_config
from omni_attn.testing import fake_ranks
from tests.models.minimax_h3.sparse_models import SPARSE, SPARSE_KIND, run, sparse_model
from tests.models.minimax_h3.tiny_models import KINDS, Kind, build_inputs, build_model, shuffled
from tests.models.minimax_h3.tiny_pipelines import TEXT_ROWS, build_transformer, noise, text
from tests.parallel.counted import CountedCollectives
from tests.parallel.traced import traced_rank

DEGREES = {
    "ulysses": [{"ulysses_degree": 2}, {"ulysses_degree": 3}],
    "ring": [{"ring_degree": 2}, {"ring_degree": 3}],
    "ulysses_ring": [{"ulysses_degree": 2, "ring_degree": 2}],
    "allgather_kv": [{"allgather_degree": 2}, {"allgather_degree": 3}],
}
CONFIGS = [config for configs in DEGREES.values() for config in configs]
NAMES = [ParallelConfig.model_validate(config).describe() for config in CONFIGS]
configs = pytest.mark.parametrize("config", CONFIGS, ids=NAMES)


def on_ranks(config: dict[str, int], **inputs: Any) -> list[tuple[Tensor, Tensor]]:
    """Both outputs of each rank, of tiny models with the weights of `build_model`."""

    def work(_: Parallel) -> tuple[Tensor, Tensor]:
        with use_attention_config(None, device="cpu"):
            model = build_model()
        with torch.no_grad():
            video, audio = model(**inputs)
        return video, audio

    return fake_ranks(config, work)


def check(config: dict[str, int], inputs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        expected = build_model()(**inputs)
    for found in on_ranks(config, **inputs):
        for one, other in zip(found, expected, strict=True):
            assert one.is_contiguous() and one.dtype == other.dtype
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@configs
@pytest.mark.parametrize("kind", KINDS)
def test_every_packing(config: dict[str, int], kind: str) -> None:
    check(config, build_inputs(kind))


@configs
def test_rows_of_a_kind_need_not_lie_together(config: dict[str, int]) -> None:
    check(config, shuffled(build_inputs("ref2va")))


@configs
@pytest.mark.parametrize("padded_len", [48, 64, 97])
def test_padding_behind_the_rows(config: dict[str, int], padded_len: int) -> None:
    """Up to ranks that hold nothing but padding."""
    check(config, build_inputs("fl2va", batch=1, padded_len=padded_len))


@configs
@pytest.mark.parametrize("audio", [0, 1])
def test_fewer_rows_than_ranks(config: dict[str, int], audio: int) -> None:
    check(config, build_inputs(Kind(grid=(1, 1, 1), text=2, audio=audio)))


def test_more_ranks_than_heads_and_rows() -> None:
    check({"ulysses_degree": 5}, build_inputs(Kind(grid=(1, 1, 1), text=2, audio=0)))


def test_heads_leave_the_device_as_velocities() -> None:
    """What all ranks gather at the end is as wide as a row of video, not as the residual stream."""
    config, inputs = {"ulysses_degree": 2}, build_inputs("fl2va", batch=1)

    def work(parallel: Parallel) -> list[int]:
        everyone = CountedCollectives(parallel.everyone)
        with use_attention_config(None, device="cpu"), use_parallel(replace(parallel, everyone=everyone)):
            model = build_model()
        records = model.attention_records(KINDS["fl2va"].layout)
        prepare_attention(model, records, model.config.attention_lengths(47, 5))
        with torch.no_grad():
            model(**inputs, attention_records=records)
        return everyone.sent

    rows = 24  # the longer share of 47
    assert fake_ranks(config, work) == [[rows * 24]] * 2


@configs
def test_gradients_of_all_ranks_add_up_to_those_of_one(config: dict[str, int]) -> None:
    """Each rank takes the loss of everything, so their mean is the loss of one process."""
    alone, inputs = build_model(), build_inputs("ref2va")
    sum(output.square().sum() for output in alone(**inputs)).backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}

    def work(_: Parallel) -> tuple[MiniMaxH3Model, Tensor]:
        with use_attention_config(None, device="cpu"):
            model = build_model()
        video, audio = model(**inputs)
        return model, video.square().sum() + audio.square().sum()

    made = fake_ranks(config, work)
    torch.stack([loss for _, loss in made]).mean().backward()
    for name, gradient in expected.items():
        found = [dict(model.named_parameters())[name].grad for model, _ in made]
        total = torch.stack([part for part in found if part is not None]).sum(0)
        assert gradient is not None
        error = (total - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("padded_len", [None, 256])
def test_video_sparse_attention(ranks: int, gated: bool, padded_len: int | None) -> None:
    """Three ranks share two heads: the third only passes its rows on."""
    expected = run(sparse_model(gate_compress=gated), SPARSE_KIND, padded_len)
    dense = run(build_model(gate_compress=gated), SPARSE_KIND, padded_len)
    assert (expected[0] - dense[0]).abs().max() > 1e-3

    def work(_: Parallel) -> tuple[tuple[Tensor, Tensor], list[tuple[str, str, str]]]:
        model = sparse_model(gate_compress=gated)
        outputs = run(model, SPARSE_KIND, padded_len)
        return outputs, [(row.role, row.impl, row.route) for row in attention_report(model)]

    for found, rows in fake_ranks({"ulysses_degree": ranks}, work):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert sorted(rows) == [
            (REFINER_ROLE, "TorchSDPAImpl", "TORCH_SDPA"),
            ("self", "MiniMaxH3VSAImpl", "FASTVIDEO_VSA (torch): VSA"),
        ]


@pytest.mark.parametrize("mode", ["ring", "allgather_kv", "ulysses_ring"])
def test_video_sparse_attention_is_refused_where_heads_do_not_see_all(mode: str) -> None:
    planned = ParallelConfig.model_validate(DEGREES[mode][0])
    with (
        pytest.raises(BackendRejectedError, match=f"{mode}, found support for ulysses"),
        use_parallel(planned),
    ):
        sparse_model(SPARSE)


def test_layers_state_the_mode_and_the_refiner_stays_whole() -> None:
    with use_parallel(ParallelConfig(ulysses_degree=2)), use_attention_config(None, device="cpu"):
        model = build_model()
    modes = {
        layer.role: layer.request.sequence_parallel
        for layer in model.modules()
        if isinstance(layer, Attention)
    }
    assert modes == {"self": "ulysses", REFINER_ROLE: None}
    with pytest.raises(MetadataError, match="torchrun"), torch.no_grad():
        model(**build_inputs())


@configs
@pytest.mark.parametrize("packing", ["t2va", "fl2va", "ref2va, padded"])
def test_whole_loops(config: dict[str, int], packing: str) -> None:
    """Four points of the schedule; noise, keyframes and references come whole to every rank."""
    video, audio = noise(latent=(7, 4, 6))
    audio = audio[..., :9]
    generator = torch.Generator().manual_seed(4)
    frames = [torch.randn(1, 24, 1, 4, 6, generator=generator) for _ in range(2)]
    references = (ImageReference((4, 4)), VideoReference((2, 4, 6), audio_latents=3))
    sequence = pack_ref2va(TEXT_ROWS, (7, 4, 6), 9, references).padded(64)
    held_video = torch.randn(1, sequence.condition_video_rows, 96, generator=generator)
    held_audio = torch.randn(1, sequence.condition_audio_rows, 32, generator=generator)

    def denoised(model: MiniMaxH3Model) -> tuple[Tensor, Tensor]:
        pipeline = MiniMaxH3Pipeline.for_plan(model)
        if packing == "ref2va, padded":
            rows = (
                torch.cat([held_video, patchify(video)], 1),
                torch.cat([held_audio, audio_to_rows(audio)], 1),
            )
            return pipeline.denoise_rows(sequence, text(), *rows, num_inference_steps=4)
        keyframes = Keyframes(*frames) if packing == "fl2va" else None
        return pipeline(Prompt(text()), video, audio, keyframes=keyframes, num_inference_steps=4)

    expected = denoised(build_transformer())

    def work(_: Parallel) -> tuple[Tensor, Tensor]:
        with use_attention_config(None, device="cpu"):
            return denoised(build_transformer.__wrapped__())

    for found in fake_ranks(config, work):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("differs", ["video_rows", "prompt_embeds", "num_inference_steps", "scheduler.shift"])
def test_ranks_that_are_given_different_things_are_told(differs: str) -> None:
    video, audio = noise(latent=(7, 4, 6))
    told: list[str] = []

    def work(parallel: Parallel) -> None:
        with use_attention_config(None, device="cpu"):
            pipeline = MiniMaxH3Pipeline.for_plan(build_transformer.__wrapped__())
        off = float(parallel.rank == 1)
        pipeline.scheduler.set_shift(12.0 + off * (differs == "scheduler.shift"))
        sequence = pack_t2va(TEXT_ROWS, (7, 4, 6), 9)
        prompt = text() + off * (differs == "prompt_embeds")
        rows = patchify(video) + off * (differs == "video_rows")
        steps = 4 + int(off * (differs == "num_inference_steps"))
        with pytest.raises(
            MetadataError, match=f"{differs} differs between the 3 ranks.*rank 1 from rank 0"
        ) as error:
            pipeline.denoise_rows(
                sequence, prompt, rows, audio_to_rows(audio[..., :9]), num_inference_steps=steps
            )
        told.append(str(error.value))

    fake_ranks({"ulysses_degree": 3}, work)
    assert len(told) == 3 and len(set(told)) == 1


def test_a_rank_needs_less_memory() -> None:
    source, generation = load_source("minimax-h3-tiny"), MiniMaxH3GenerationConfig()
    geometry = source.geometry(source.settle(generation))
    alone = activation_allowance(source, geometry, 512, "bfloat16")
    for degrees in ({"ulysses_degree": 2}, {"ring_degree": 2}):
        share = activation_allowance(
            source, geometry, 512, "bfloat16", ParallelConfig.model_validate(degrees)
        )
        assert alone / 2 < share < alone


@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_equal_blocks_compile_into_one_frame_and_a_second_length_into_one_more(mode: str) -> None:
    longer = Kind(grid=(8, 4, 8), condition_video=5)
    with traced_rank(DEGREES[mode][0]) as parallel:
        with use_parallel(parallel):
            model = sparse_model(SPARSE if mode == "ulysses" else {}, gate_compress=mode == "ulysses")
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        torch._dynamo.reset()
        for block in model.transformer_blocks:
            block.compile(fullgraph=True, backend=counter)
        for kind, frames in ((SPARSE_KIND, 1), (longer, 2), (SPARSE_KIND, 2)):
            video, audio = run(model, kind)
            assert (video.shape[1], audio.shape[1]) == (prod(kind.grid) + 5, 6)
            assert counter.frame_count == frames


@pytest.mark.parametrize("mode", ["ulysses", "allgather_kv"])
def test_the_whole_model_compiles_without_a_break(mode: str) -> None:
    with traced_rank(DEGREES[mode][0]) as parallel:
        with use_parallel(parallel):
            model = sparse_model(SPARSE if mode == "ulysses" else {}, gate_compress=mode == "ulysses")
        records = model.attention_records(SPARSE_KIND.layout)
        lengths = model.config.attention_lengths(SPARSE_KIND.rows, SPARSE_KIND.text)
        prepare_attention(model, records, lengths)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            video, audio = compiled(**build_inputs(SPARSE_KIND, batch=1), attention_records=records)
        assert (video.shape[1], audio.shape[1]) == (prod(SPARSE_KIND.grid) + 5, 6)
