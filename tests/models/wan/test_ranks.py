"""Wan among ranks equals Wan alone: every kind of model and mode, gradients, memory; and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_attn import Attention, prepare_attention
from omni_attn.config import ParallelConfig, PipelineConfig
from omni_attn.errors import BackendRejectedError, ConfigError, MetadataError
from omni_attn.models.wan.causal.model import CausalWanModel
from omni_attn.models.wan.causal.plan import CachePlan
from omni_attn.models.wan.family import attention_lengths
from omni_attn.models.wan.model import WanModel
from omni_attn.models.wan.needs import activation_allowance
from omni_attn.models.wan.source import load_source
from omni_attn.parallel import Parallel, use_parallel
from omni_attn.parallel.dispatch import STRATEGIES
from omni_attn.testing import fake_ranks
from tests.models.wan.gated import NAME, gated_backend
from tests.models.wan.ranks import DEGREES, on_cpu
from tests.models.wan.tiny_models import (
    KINDS,
    TOKENS,
    build_inputs,
    build_model,
    config_of,
    seed_weights,
)

GATED = {"per_role": {"self": NAME}}


def forwards(kind: str, degrees: dict[str, int], inputs: Any) -> list[Tensor]:
    def work(_: Parallel) -> Tensor:
        output: Tensor = on_cpu(lambda: build_model(kind))(*inputs)
        return output

    return fake_ranks(degrees, work)


@pytest.mark.parametrize("degrees", DEGREES, ids=STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_equals_that_of_one_process(kind: str, degrees: dict[str, int]) -> None:
    inputs = build_inputs(kind)
    with torch.no_grad():
        alone = build_model(kind)(*inputs)
        together = forwards(kind, degrees, inputs)
    assert alone.std() > 0.3  # a comparison of zeros would prove nothing
    for output in together:
        assert output.is_contiguous() == alone.is_contiguous()
        torch.testing.assert_close(output, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("degrees", DEGREES, ids=STRATEGIES)
@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 1, 3), (3, 1, 5)], ids=["1 token", "3 tokens", "15 tokens"])
@pytest.mark.parametrize("per_token", [False, True], ids=["one time", "a time per token"])
def test_ranks_with_fewer_tokens_or_none(
    grid: tuple[int, int, int], degrees: dict[str, int], per_token: bool
) -> None:
    tokens = grid[0] * grid[1] * grid[2]
    latent, timestep, text, _ = build_inputs("t2v")
    latent = latent[:, :, :1, :2, :2].repeat(1, 1, *grid) * torch.linspace(0.5, 1.5, 2 * grid[2])
    if per_token:
        timestep = timestep[:, None] * torch.linspace(0, 1, tokens)
    with torch.no_grad():
        alone = build_model("t2v")(latent, timestep, text)
        for output in forwards("t2v", degrees, (latent, timestep, text)):
            torch.testing.assert_close(output, alone, atol=1e-5, rtol=1e-5)


def test_a_copy_runs_among_the_same_ranks_and_no_file_holds_them() -> None:
    """As averages of weights are kept. Outside of use_parallel, since nothing reads it later."""
    inputs = build_inputs("t2v")

    def work(parallel: Parallel) -> None:
        with torch.no_grad():
            model = on_cpu(lambda: build_model("t2v"))
            with use_parallel(None):
                twin = copy.deepcopy(model)
                alone = on_cpu(lambda: build_model("t2v"))
                alone.load_state_dict(model.state_dict())
                assert twin.parallel is parallel and alone.parallel is None
                assert torch.equal(twin(*inputs), model(*inputs))
                torch.testing.assert_close(alone(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)
        with pytest.raises(pickle.PicklingError, match=r"Save state_dict\(\)"):
            torch.save(model, io.BytesIO())

    fake_ranks({"ulysses_degree": 2, "ring_degree": 2}, work)


@pytest.mark.parametrize("ranks", [3, 5])
def test_heads_that_ranks_do_not_share_evenly(ranks: int) -> None:
    inputs = build_inputs("i2v")
    with torch.no_grad():
        alone = build_model("i2v")(*inputs)
        for output in forwards("i2v", {"ulysses_degree": ranks}, inputs):
            torch.testing.assert_close(output, alone, atol=1e-5, rtol=1e-5)


def test_each_rank_computes_its_own_tokens_only() -> None:
    inputs = build_inputs("ti2v")
    seen: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set(), 2: set(), 3: set()}

    def work(parallel: Parallel) -> None:
        model = on_cpu(lambda: build_model("ti2v"))

        def note(_: Any, arguments: Any, output: Tensor) -> None:
            seen[parallel.rank].add(output.shape[1:2])

        watched = [*model.blocks, model.proj_out, model.patch_embedding, model.condition_embedder.time_proj]
        watched += [module.attention for block in model.blocks for module in (block.attn1, block.attn2)]
        for module in watched:
            module.register_forward_hook(note)
        with torch.no_grad():
            model(*inputs)

    fake_ranks({"ulysses_degree": 4}, work)
    assert TOKENS == 18 and seen == {0: {(5,)}, 1: {(5,)}, 2: {(4,)}, 3: {(4,)}}


def test_the_position_table_holds_the_own_tokens_only() -> None:
    inputs = build_inputs("t2v")

    def work(parallel: Parallel) -> list[tuple[int, int]]:
        model = on_cpu(lambda: build_model("t2v"))
        with torch.no_grad():
            model(*inputs)
        (table,) = model._rope._tables.values()
        return [(part.shape[1], part.untyped_storage().nbytes() // part[:, 0].nbytes) for part in table]

    assert fake_ranks({"ulysses_degree": 4}, work) == [2 * [(n, n)] for n in (5, 5, 4, 4)]


@pytest.mark.parametrize("degrees", DEGREES, ids=STRATEGIES)
def test_the_velocity_is_gathered_once(degrees: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, gathered = build_inputs("t2v"), []
    real = Parallel.gather

    def gather(self: Parallel, tensor: Tensor, total: int, dim: int = 1) -> Tensor:
        gathered.append((self.rank, tuple(tensor.shape), total))
        return real(self, tensor, total, dim)

    monkeypatch.setattr(Parallel, "gather", gather)
    with torch.no_grad():
        forwards("t2v", degrees, inputs)
    ranks = ParallelConfig.model_validate(degrees).size
    own = [TOKENS // ranks + (rank < TOKENS % ranks) for rank in range(ranks)]
    assert sorted(gathered) == [(rank, (2, own[rank], 16), TOKENS) for rank in range(ranks)]


@pytest.mark.parametrize("degrees", [{"ulysses_degree": 3}, *DEGREES], ids=["ulysses of 3", *STRATEGIES])
@pytest.mark.parametrize("kind", ["t2v", "ti2v", "i2v"])
def test_the_mean_of_the_gradients_is_the_gradient(kind: str, degrees: dict[str, int]) -> None:
    inputs = build_inputs(kind)
    alone = build_model(kind)
    weight = torch.randn(alone(*inputs).shape, generator=torch.Generator().manual_seed(5))
    latent = inputs[0].clone().requires_grad_()
    (alone(latent, *inputs[1:]) * weight).sum().backward()

    def work(_: Parallel) -> tuple[Tensor, WanModel, Tensor]:
        model, own = on_cpu(lambda: build_model(kind)), inputs[0].clone().requires_grad_()
        return (model(own, *inputs[1:]) * weight).sum(), model, own

    losses, models, latents = zip(*fake_ranks(degrees, work), strict=True)
    torch.stack(losses).sum().backward()
    for (name, expected), *found in zip(
        alone.named_parameters(), *(model.parameters() for model in models), strict=True
    ):
        assert expected.grad is not None, name
        mean = sum(parameter.grad for parameter in found) / len(models)
        torch.testing.assert_close(mean, expected.grad, atol=1e-4, rtol=1e-4, msg=name)
    torch.testing.assert_close(
        sum(own.grad for own in latents) / len(models), latent.grad, atol=1e-4, rtol=1e-4
    )


def test_gates_of_video_sparse_attention_travel_with_the_queries() -> None:
    latent, timestep, text, _ = build_inputs("t2v")
    config = replace(config_of("t2v"), gate_compress=True)

    def build() -> WanModel:
        model = WanModel(config).eval()
        seed_weights(model)
        return model

    with gated_backend() as seen, torch.no_grad():
        alone = on_cpu(build, GATED)(latent, timestep, text)
        together = fake_ranks({"ulysses_degree": 2}, lambda _: on_cpu(build, GATED)(latent, timestep, text))
    for output in together:
        torch.testing.assert_close(output, alone, atol=1e-5, rtol=1e-5)
    whole, *shared = [gate.shape for gate in seen.gates if gate is not None]
    assert tuple(whole) == (2, TOKENS, 2, 12) and {tuple(shape) for shape in shared[1:]} == {
        (2, TOKENS, 1, 12)
    }
    assert {record.vsa_dit_seq_shape for record in seen.records} == {(3, 2, 3)}


def test_records_of_the_caller_are_prepared_with_this_ranks_lengths() -> None:
    inputs = build_inputs("i2v")

    def work(parallel: Parallel) -> tuple[dict[str, tuple[int, int]], Tensor]:
        model = on_cpu(lambda: build_model("i2v"))
        records = model.attention_records((3, 2, 3))
        lengths = model.attention_lengths((3, 2, 3), image_tokens=7)
        prepare_attention(model, records, lengths=lengths)
        with torch.no_grad():
            return lengths, model(*inputs, attention_records=records)

    with torch.no_grad():
        alone = build_model("i2v")(*inputs)
    for (lengths, output), own in zip(fake_ranks({"ulysses_degree": 4}, work), (5, 5, 4, 4), strict=True):
        assert lengths == {"self": (18, 18), "cross": (own, 512), "cross.image": (own, 7)}
        torch.testing.assert_close(output, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_dmd", [False, True], ids=["dense where all blocks are", "distilled"])
def test_video_sparse_attention(is_dmd: bool) -> None:
    latent, timestep, text, _ = build_inputs("t2v")
    wider = latent.repeat(1, 1, 3, 2, 2) * torch.linspace(0.5, 1.5, 12)

    def build() -> WanModel:
        model = WanModel(replace(config_of("t2v"), gate_compress=True), is_dmd=is_dmd).eval()
        seed_weights(model)
        return model

    choice = {"per_role": {"self": {"backend": "FASTVIDEO_VSA", "fastvideo_vsa": {"topk": 2}}}}
    routes = []
    for inputs in ((latent, timestep, text), (wider, timestep, text)):

        def forward(_: Parallel | None = None, inputs: Any = inputs) -> tuple[Tensor, str | None]:
            model = on_cpu(build, choice)
            output = model(*inputs)
            return output, model.blocks[0].attn1.attention.route

        with torch.no_grad():
            alone, route = forward()
            for output, other in fake_ranks({"ulysses_degree": 2}, forward):
                torch.testing.assert_close(output, alone, atol=1e-5, rtol=1e-5)
                assert other == route
        routes.append(route)
    assert routes[0] != routes[1]  # all of 1 tile, and 2 of 6


def test_a_causal_model_is_not_split() -> None:
    plan = CachePlan(frame_tokens=6, chunk_frames=1, block_size=2)
    refusal = r"ulysses_degree 2 .* 2 ranks.*CausalWanModel .* one device"
    with use_parallel(ParallelConfig(ulysses_degree=2)), pytest.raises(ConfigError, match=refusal):
        CausalWanModel(config_of("t2v"), plan)


def test_a_planned_model_states_its_mode_and_cannot_run() -> None:
    with use_parallel(ParallelConfig(ulysses_degree=2)):
        model = build_model("t2v")
    modes = {
        layer.role: layer.request.sequence_parallel
        for layer in model.modules()
        if isinstance(layer, Attention)
    }
    assert modes == {"self": "ulysses", "cross": None}
    with torch.no_grad(), pytest.raises(MetadataError, match="no processes are connected"):
        model(*build_inputs("t2v"))


def test_a_backend_that_does_not_serve_the_mode_is_refused_when_the_model_is_built() -> None:
    with (
        gated_backend(),
        use_parallel(ParallelConfig(ring_degree=2)),
        pytest.raises(BackendRejectedError, match="ring"),
    ):
        on_cpu(lambda: build_model("t2v"), GATED)


def configured(**changes: Any) -> PipelineConfig:
    size = {"height": 64, "width": 96, "num_frames": 9}
    values = {"pipeline": "wan", "model": "wan-tiny", "device": "cpu", "generation": size}
    return PipelineConfig.model_validate(values | changes)


def test_hints_are_of_the_whole_for_self_attention_and_of_the_largest_piece_for_cross_attention() -> None:
    assert attention_lengths(configured()) == {"self": (72, 72), "cross": (72, 512)}
    found = attention_lengths(configured(parallel={"ulysses_degree": 5}))
    assert found == {"self": (72, 72), "cross": (15, 512)}


def test_a_rank_needs_less_memory() -> None:
    source = load_source("wan2.1-t2v-14b")
    config = configured(model="wan2.1-t2v-14b", generation={"height": 720, "width": 1280, "num_frames": 81})
    geometry = source.geometry(config.generation)
    alone = activation_allowance(source, geometry)
    for degrees in ({"ulysses_degree": 8}, {"ring_degree": 8}, {"ulysses_degree": 4, "ring_degree": 2}):
        share = activation_allowance(source, geometry, ParallelConfig.model_validate(degrees))
        assert alone / 8 < share < alone / 4, degrees
    # All keys and values, however many ranks.
    gathered = activation_allowance(source, geometry, ParallelConfig(allgather_degree=64))
    assert gathered > 4 * 2 * geometry.num_tokens * source.transformer.dim
    # Forty heads on 64 ranks: one head is more than a sixty-fourth.
    spread = activation_allowance(source, geometry, ParallelConfig(ulysses_degree=64))
    assert alone / 64 < spread < alone / 16
