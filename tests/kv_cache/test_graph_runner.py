"""Captured steps on the CPU: replays see what lies in the buffers, and Python's values of the capture."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch

from omni_attn.backends.paged import CommonAttentionMetadata, PagedAttentionImpl
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.backends.torch_sdpa_paged import TorchSDPAPagedBuilder, TorchSDPAPagedImpl
from omni_attn.errors import MetadataError
from omni_attn.kv_cache import (
    AttentionCGSupport,
    BatchDescriptor,
    BlockTable,
    CUDAGraphMode,
    GraphRunner,
    StepInputs,
    cudagraph_supports,
    resolve_cudagraph_mode,
)
from omni_attn.kv_cache.groups import graph_support
from tests.kv_cache.counted import make_common
from tests.kv_cache.paged_model import CHUNK, PAGE, PAGES_OF_A_STREAM, World

MOST = PAGE * PAGES_OF_A_STREAM


def chunks(reqs: int) -> BatchDescriptor:
    return BatchDescriptor(num_tokens=reqs * CHUNK, num_reqs=reqs, query_len=CHUNK, max_seq_len=MOST)


def mixed(tokens: int, reqs: int) -> BatchDescriptor:
    return BatchDescriptor(num_tokens=tokens, num_reqs=reqs, max_seq_len=MOST)


def captured(world: World, *sizes: BatchDescriptor, causal: bool = False, **options: Any) -> GraphRunner:
    """A runner with graphs, captured on a stream that is gone again; nothing was written."""
    runner = world.runner(**options)
    world.open({"warm": CHUNK})
    before = {name: cache.clone() for name, cache in world.caches.items()}
    runner.capture(sizes, world.tensors(CHUNK, 0), {"self": world.common(["warm"], causal=causal)})
    for name, cache in world.caches.items():
        torch.testing.assert_close(cache, before[name], rtol=0, atol=0, equal_nan=True)
    world.table.remove("warm")
    return runner


def go(
    world: World, runner: GraphRunner, lengths: dict[str, int], seed: int, *, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk of two denoising steps by the runner, and by a twin without one: the last outputs."""
    twin = world.twin
    for one in (world, twin):
        one.open(lengths)
    for step in range(2):
        inputs = world.tensors(sum(lengths.values()), 10 * seed + step)
        ran = runner(inputs, {"self": world.common(list(lengths), causal=causal)})
        wanted = twin.eager(inputs, twin.common(list(lengths), causal=causal))
        assert ran.shape == wanted.shape
    for one in (world, twin):
        one.commit(list(lengths))
    return ran, wanted


@pytest.mark.parametrize("debug", [False, True])
def test_replays_follow_block_tables_that_grow_and_slide(debug: bool) -> None:
    world = World.make()
    runner = captured(world, chunks(1), debug=debug)
    for chunk in range(6):
        ran, wanted = go(world, runner, {"video": CHUNK}, chunk)
        assert not ran.isnan().any() and not torch.equal(ran[:CHUNK], world.tensors(CHUNK, 0)["x"])
        torch.testing.assert_close(ran, wanted)
    assert world.table.position("video") == 6 * CHUNK and world.table.kept("video") < 6 * CHUNK
    assert (runner.replays, sum(runner.eager.values())) == (12, 0)


def test_smaller_batches_are_padded_and_come_back_without_padding() -> None:
    world = World.make()
    runner = captured(world, chunks(4), chunks(2))
    for seed, streams in enumerate((["a"], ["a", "b", "c"], ["b", "c", "d", "a"], ["d"], ["c", "b"])):
        ran, wanted = go(world, runner, dict.fromkeys(streams, CHUNK), seed)
        torch.testing.assert_close(ran, wanted)
    assert runner.replays == 10 and not runner.eager


def test_mixed_batches_replay_where_the_mode_captures_them() -> None:
    world = World.make()
    runner = captured(world, mixed(64, 4), chunks(1), causal=True)
    for seed, lengths in enumerate(({"a": 7}, {"a": 1, "b": 24}, {"c": 16}, {"a": 1, "b": 1, "c": 1})):
        ran, wanted = go(world, runner, lengths, seed, causal=True)
        torch.testing.assert_close(ran, wanted)
    assert runner.replays == 8 and not runner.eager


def test_a_chunk_stages_its_metadata_once() -> None:
    world = World.make()
    runner = captured(world, chunks(1))
    builds = 0
    original = TorchSDPAPagedBuilder.build

    def counted(self: Any, common: CommonAttentionMetadata) -> Any:
        nonlocal builds
        builds += 1
        return original(self, common)

    with patch.object(TorchSDPAPagedBuilder, "build", counted):
        for chunk in range(3):
            world.open({"video": CHUNK})
            for step in range(5):
                runner(world.tensors(CHUNK, step), {"self": world.common(["video"])})
            assert builds == chunk + 1
            world.commit(["video"])


def test_pages_that_kernels_get_in_parts_are_followed_too() -> None:
    with patch.object(TorchSDPABackend, "get_supported_kernel_block_sizes", return_value=(PAGE // 4,)):
        world = World.make()
        assert world.twin.groups[0].block_ratio == world.groups[0].block_ratio == 4
    runner = captured(world, chunks(1))
    for chunk in range(4):
        torch.testing.assert_close(*go(world, runner, {"video": CHUNK}, chunk))
        # Larger than what was captured, and in pages of its own.
        torch.testing.assert_close(*go(world, runner, {"a": 3, "b": 9, "c": 1}, chunk))
    assert runner.replays == 8


def test_each_group_is_planned_for_the_keys_that_its_table_holds() -> None:
    """So that a replay launches what an eager step over full pages does."""
    world = World.make()
    runner = world.runner()
    world.open({"video": CHUNK})
    common = {"self": world.common(["video"])}
    size = replace(BatchDescriptor.of(common), max_seq_len=100 * MOST)
    build = TorchSDPAPagedBuilder.build
    with patch.object(TorchSDPAPagedBuilder, "build", autospec=True, side_effect=build) as built:
        runner.capture(size, world.tensors(CHUNK, 0), common)
    assert {call.args[1].max_seq_len for call in built.call_args_list} == {MOST}
    inputs = world.tensors(CHUNK, 1)
    ran = runner(inputs, common).clone()
    torch.testing.assert_close(ran, world.eager(inputs, common["self"]))


def test_what_groups_share_is_copied_once() -> None:
    world, staged = World.make(), list[Any]()
    world.open({"a": CHUNK})
    common = world.common(["a"])
    commons = {"self": common, "later": common.replace(block_table=common.block_table.clone())}

    def build(commons: Any, *, capture: bool) -> Any:
        staged.append(commons)
        return tuple(commons.values())

    runner = GraphRunner(lambda inputs, metadata: inputs["x"] * 2, build, device="cpu")
    runner.capture(chunks(2), {"x": torch.ones(CHUNK)}, commons)
    assert torch.equal(runner({"x": torch.full((CHUNK,), 3.0)}, commons), torch.full((CHUNK,), 6.0))
    first, later = staged[-1].values()
    assert first.seq_lens is later.seq_lens and first.slot_mapping is later.slot_mapping
    assert first.block_table.data_ptr() != later.block_table.data_ptr()
    assert first.num_reqs == 2 and first.max_seq_len == MOST and first.seq_lens.tolist() == [CHUNK, 0]
    assert first.slot_mapping.tolist()[CHUNK:] == [-1] * CHUNK and int(first.slot_mapping.min()) == -1


def test_an_eager_step_between_replays_does_no_harm() -> None:
    world = World.make()
    runner = captured(world, chunks(1))
    world.open({"video": CHUNK, "other": 3})
    inputs, common = world.tensors(CHUNK, 1), world.common(["video"])
    first = runner(inputs, {"self": common}).clone()
    runner(world.tensors(3, 2), {"self": world.common(["other"])})
    assert torch.equal(runner(inputs, {"self": world.common(["video"])}), first)
    assert runner.replays == 2 and sum(runner.eager.values()) == 1


def test_what_no_graph_takes_runs_eagerly_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World.make()
    runner = captured(world, chunks(1), mode=CUDAGraphMode.FULL_DECODE_ONLY)
    with caplog.at_level(logging.WARNING, "omni_attn"):
        for seed, lengths in enumerate(({"a": CHUNK, "b": CHUNK}, {"a": CHUNK, "b": 3}, {"a": 5})):
            torch.testing.assert_close(*go(world, runner, lengths, seed))
        torch.testing.assert_close(
            *go(world, runner, {"c": CHUNK}, 7, causal=True)
        )  # captured was causal=False
    assert runner.replays == 0
    assert dict(runner.eager) == {
        "no captured graph takes the uniform batch": 6,
        "cudagraph_mode FULL_DECODE_ONLY captures no mixed batches": 2,
    }
    assert len([text for text in caplog.messages if "runs eagerly" in text]) == 1


def test_without_graphs_it_runs_eagerly() -> None:
    world = World.make()
    runner = world.runner(mode=CUDAGraphMode.NONE)
    torch.testing.assert_close(*go(world, runner, {"a": CHUNK}, 0))
    assert runner.replays == 0
    with pytest.raises(ValueError, match=r"CUDAGraphMode\.NONE runs such batches as NONE"):
        captured(World.make(), chunks(1), mode=CUDAGraphMode.NONE)


def test_inference_mode_and_no_grad_share_a_graph() -> None:
    world = World.make()
    with torch.inference_mode():
        runner = captured(world, chunks(1))
        torch.testing.assert_close(*go(world, runner, {"video": CHUNK}, 0))
    with torch.no_grad():
        torch.testing.assert_close(*go(world, runner, {"video": CHUNK}, 1))
    with torch.inference_mode():
        torch.testing.assert_close(*go(world, runner, {"video": CHUNK}, 2))
    assert runner.replays == 6


@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_modes_with_pieces_are_refused(mode: CUDAGraphMode) -> None:
    with pytest.raises(ValueError, match="piecewise_available=False"):
        World.make().runner(mode=mode)


def test_captures_that_cannot_be_are_refused() -> None:
    world = World.make()
    runner = captured(world, chunks(1), mode=CUDAGraphMode.FULL_DECODE_ONLY)
    world.open({"a": CHUNK, "b": CHUNK})
    both, one = {"self": world.common(["a", "b"])}, world.tensors(CHUNK, 0)
    with pytest.raises(ValueError, match="does not fit"):
        runner.capture(chunks(1), world.tensors(2 * CHUNK, 0), both)
    with pytest.raises(ValueError, match="runs such batches as NONE"):
        runner.capture(mixed(64, 4), one, {"self": world.common(["a"])})
    with pytest.raises(ValueError, match="captured before"):
        runner.capture(chunks(1), one, {"self": world.common(["a"])})
    with pytest.raises(RuntimeError, match="cannot grow"):
        runner.capture(chunks(2), one, {"self": world.common(["a"])})
    with pytest.raises(MetadataError, match=r'input "x" has shape \[15, 64\], and the step has 16 tokens'):
        runner({**one, "x": one["x"][:15]}, {"self": world.common(["a"])})


@pytest.mark.parametrize(
    ("numbers", "wrong"),
    [
        ({"num_tokens": 5, "num_reqs": 2, "query_len": 2}, "are 4 tokens, found num_tokens=5"),
        ({"num_tokens": 0, "num_reqs": 1}, "positive"),
        ({"num_tokens": 2, "num_reqs": 1, "max_seq_len": 0}, "positive"),
    ],
)
def test_descriptors_that_no_batch_has(numbers: dict[str, int], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        BatchDescriptor(**{"max_seq_len": 8, **numbers})


def test_a_descriptor_of_a_step() -> None:
    world = World.make()
    world.open({"a": 3, "b": 3, "c": 5})
    assert BatchDescriptor.of({"self": world.common(["a", "b"])}) == BatchDescriptor(
        num_tokens=6, num_reqs=2, query_len=3, max_seq_len=3
    )
    many = BatchDescriptor.of({"self": world.common(["a", "c"])}, max_seq_len=MOST)
    assert many == mixed(8, 2) and many.max_query_len == 8
    one = world.common(["a"])
    with pytest.raises(ValueError, match="same tokens"):
        BatchDescriptor.of({"self": one, "cross": one.padded(2, 9)})
    with pytest.raises(ValueError, match="same tokens"):
        BatchDescriptor.of({})


# --- builders and steps that a graph cannot hold

BUILD = TorchSDPAPagedBuilder.build


@dataclass(frozen=True, eq=False)
class Wrong:
    """A way to break the rule of builders, and what the error says."""

    change: Callable[[TorchSDPAPagedBuilder, CommonAttentionMetadata, Any], Any]
    place: str


def unstaged(builder: TorchSDPAPagedBuilder, common: CommonAttentionMetadata, metadata: Any) -> Any:
    return replace(metadata, mask=metadata.mask.clone())


def number_of_the_step(builder: TorchSDPAPagedBuilder, common: CommonAttentionMetadata, metadata: Any) -> Any:
    return BUILD(builder, replace(common, max_seq_len=int(common.seq_lens.max())))


@pytest.mark.parametrize(
    "wrong", [Wrong(unstaged, "mask"), Wrong(number_of_the_step, "num_keys")], ids=lambda wrong: wrong.place
)
def test_metadata_that_a_replay_would_not_read_is_an_error(wrong: Wrong) -> None:
    world = World.make()

    def build(self: TorchSDPAPagedBuilder, common: CommonAttentionMetadata) -> Any:
        return wrong.change(self, common, BUILD(self, common))

    with patch.object(TorchSDPAPagedBuilder, "build", build):
        runner = captured(world, chunks(1))
        world.open({"video": CHUNK})
        world.commit(["video"])
        world.open({"video": CHUNK})
        with pytest.raises(RuntimeError, match=rf"metadata.*blocks\.0.*\.{wrong.place} is"):
            runner(world.tensors(CHUNK, 1), {"self": world.common(["video"])})


def test_debug_finds_a_step_that_reads_what_changes() -> None:
    world, calls = World.make(), count()
    options = {"device": "cpu", "input_axes": {"shift": None}, "debug": True}
    runner = GraphRunner.for_groups(
        lambda inputs, paged: world.model(inputs["x"] + next(calls), inputs["shift"], paged),
        world.groups,
        world.caches,
        **options,
    )
    world.open({"video": CHUNK})
    inputs, common = world.tensors(CHUNK, 0), {"self": world.common(["video"])}
    runner.capture(chunks(1), inputs, common)
    with pytest.raises(RuntimeError, match="differs from an eager step"):
        runner(inputs, common)


# --- what a model's own impl is captured as


class Quiet(TorchSDPAPagedImpl):
    """Changes nothing that runs."""


class Louder(TorchSDPAPagedImpl):
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs).mul_(2)


class Stated(Louder):
    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class Behind(Stated):
    def update_kv_cache(self, *args: Any) -> None:
        super().update_kv_cache(*args)


@pytest.mark.parametrize(
    ("impl", "level"),
    [
        (TorchSDPAPagedImpl, AttentionCGSupport.ALWAYS),
        (Quiet, AttentionCGSupport.ALWAYS),
        (Louder, AttentionCGSupport.NEVER),
        (Stated, AttentionCGSupport.UNIFORM_BATCH),
        (Behind, AttentionCGSupport.NEVER),
    ],
)
def test_an_impl_that_replaces_a_backends_own_states_its_level(
    impl: type[PagedAttentionImpl], level: AttentionCGSupport
) -> None:
    assert graph_support(AttentionCGSupport.ALWAYS, impl, TorchSDPAPagedImpl) is level


def test_the_levels_of_a_model_resolve_its_mode() -> None:
    world = World.make()
    supports = cudagraph_supports(world.groups)
    assert supports == {"TORCH_SDPA": AttentionCGSupport.ALWAYS}
    decision = resolve_cudagraph_mode(
        "FULL_AND_PIECEWISE", supports, attention_is_splitting_op=False, piecewise_available=False
    )
    assert decision.final is CUDAGraphMode.FULL_DECODE_ONLY


def test_runners_over_the_same_groups_do_not_leave_their_steps_to_each_other() -> None:
    """Builders stage for both in the same buffers, so a step that was staged before may be gone."""
    world = World.make()
    for cache in world.caches.values():
        cache.normal_()
    other_table = BlockTable(world.table.pool, PAGE, 4, PAGES_OF_A_STREAM, "cpu")
    other_inputs = StepInputs(other_table)
    first, second = captured(world, chunks(2)), captured(world, chunks(2))
    world.open({"long": CHUNK})
    world.commit(["long"])
    world.open({"long": CHUNK})
    other_table.add("short")
    other_table.append("short", CHUNK)
    inputs = world.tensors(CHUNK, 1)
    wanted = first(inputs, {"self": world.common(["long"])}).clone()
    second(inputs, {"self": other_inputs.common(["short"], causal=False)})
    torch.testing.assert_close(first(inputs, {"self": world.common(["long"])}), wanted)
    assert first.replays == 2 and second.replays == 1


def test_padding_does_not_make_a_batch_uniform() -> None:
    step = make_common([(3, 3), (1, 1)])
    assert BatchDescriptor.of({"self": step}).query_len is None
    assert BatchDescriptor.of({"self": step.padded(2, 6)}).query_len is None
    assert BatchDescriptor.of({"self": make_common([(3, 3), (3, 5)])}).query_len == 3
