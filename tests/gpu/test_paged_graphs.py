"""Steps over a paged KV cache as CUDA graphs: replays follow block tables that change, for every paged backend here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from omni_attn.backends.registry import DiffusionAttentionBackendEnum
from omni_attn.errors import BackendImportError, BackendRejectedError
from omni_attn.kv_cache import AttentionCGSupport, BatchDescriptor, GraphRunner, cudagraph_supports
from tests.gpu.machine import on_gpu
from tests.kv_cache.paged_model import CHUNK, PAGE, PAGES_OF_A_STREAM, World
from tests.layer.stands import load

pytestmark = on_gpu

MOST = PAGE * PAGES_OF_A_STREAM


def _paged() -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for name in DiffusionAttentionBackendEnum.__members__:
        paged = load(name).facts.paged
        if paged is not None and (paged.cache is None or "full" in paged.cache.kinds):
            found += [(name, variant.name) for variant in paged.variants] or [(name, None)]
    return found


every_paged = pytest.mark.parametrize(("name", "variant"), _paged())


def world_of(name: str, variant: str | None, level: AttentionCGSupport) -> World:
    """A model on that backend; skips what this machine refuses, and levels that the facts do not claim."""
    spec: Any = {"backend": name} | ({} if variant is None else {"variant": variant})
    try:
        world = World.make({"default": spec}, device="cuda", dtype=torch.bfloat16, layers=3, head_size=128)
    except (BackendRejectedError, BackendImportError) as refusal:
        pytest.skip(f"{name} {variant or ''}: {refusal}")
    claimed = min(cudagraph_supports(world.groups).values())
    if claimed < level:
        pytest.skip(
            f"{name} {variant or ''}: its facts say cudagraph {claimed.name}, this needs {level.name}"
        )
    return world


def captured(world: World, *sizes: BatchDescriptor, tokens: int, causal: bool = False) -> GraphRunner:
    runner = world.runner()
    world.open({"warm": tokens})
    before = {name: cache.clone() for name, cache in world.caches.items()}
    runner.capture(sizes, world.tensors(tokens, 0), {"self": world.common(["warm"], causal=causal)})
    for name, cache in world.caches.items():
        assert torch.equal(cache.view(torch.uint8), before[name].view(torch.uint8)), "a capture wrote"
    world.table.remove("warm")
    return runner


def uniform(tokens: int, reqs: int) -> BatchDescriptor:
    return BatchDescriptor(num_tokens=reqs * tokens, num_reqs=reqs, query_len=tokens, max_seq_len=MOST)


def follow(world: World, runner: GraphRunner, lengths: Mapping[str, int], seed: int, *, causal: bool) -> None:
    """A chunk of two steps replayed, and the same eagerly over other pages: the same outputs and cache."""
    streams, twin = list(lengths), world.twin
    for one in (world, twin):
        one.open(lengths)
    for step in range(2):
        inputs = world.tensors(sum(lengths.values()), 10 * seed + step)
        replayed = runner(inputs, {"self": world.common(streams, causal=causal)}).clone()
        eager, again = (twin.eager(inputs, twin.common(streams, causal=causal)) for _ in range(2))
        assert bool(replayed.isfinite().all())
        same_size = any(known.descriptor.num_tokens == len(inputs["x"]) for known in runner._captured)
        if torch.equal(eager, again) and same_size and torch.equal(replayed, eager):
            continue
        # Other bounds and sizes may split the keys otherwise, and then sum in another order.
        torch.testing.assert_close(replayed.float(), eager.float(), atol=4e-2, rtol=4e-2)
    for one in (world, twin):
        one.commit(streams)


@every_paged
def test_chunks_of_one_video_replay_with_the_bits_of_an_eager_step(name: str, variant: str | None) -> None:
    """The graph's bound on the keys is that of the step, so both launch the same kernels."""
    world = world_of(name, variant, AttentionCGSupport.UNIFORM_BATCH)
    world.open({"video": CHUNK})
    world.eager(world.tensors(CHUNK, 0), world.common(["video"]))
    world.commit(["video"])
    world.open({"video": CHUNK})
    inputs, common = world.tensors(CHUNK, 1), {"self": world.common(["video"])}
    runner = world.runner()
    runner.capture(BatchDescriptor.of(common), inputs, common)
    eager, again = (world.eager(inputs, common["self"]) for _ in range(2))
    if not torch.equal(eager, again):
        pytest.skip(f"{name} {variant or ''}: two eager steps differ")
    assert torch.equal(runner(inputs, common), eager) and runner.replays == 1


@every_paged
def test_replays_follow_block_tables_that_grow_and_slide(name: str, variant: str | None) -> None:
    world = world_of(name, variant, AttentionCGSupport.UNIFORM_BATCH)
    runner = captured(world, uniform(CHUNK, 1), tokens=CHUNK)
    for chunk in range(6):
        follow(world, runner, {"video": CHUNK}, chunk, causal=False)
    assert world.table.kept("video") < world.table.position("video") == 6 * CHUNK
    assert runner.replays == 12 and not runner.eager


@every_paged
def test_batches_of_several_sizes(name: str, variant: str | None) -> None:
    world = world_of(name, variant, AttentionCGSupport.UNIFORM_BATCH)
    runner = captured(world, uniform(CHUNK, 4), uniform(CHUNK, 2), tokens=CHUNK)
    for seed, streams in enumerate((["a"], ["a", "b", "c"], ["b", "c", "d", "a"], ["d"], ["c", "b"])):
        follow(world, runner, dict.fromkeys(streams, CHUNK), seed, causal=False)
    assert runner.replays == 10 and not runner.eager


@every_paged
def test_decode_of_single_tokens(name: str, variant: str | None) -> None:
    world = world_of(name, variant, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE)
    runner = captured(world, uniform(1, 4), tokens=1, causal=True)
    for one in (world, world.twin):
        one.open({"a": 20, "b": 3, "c": 1})
    inputs = world.tensors(24, 99)
    for one in (world, world.twin):
        one.eager(inputs, one.common(["a", "b", "c"], causal=True))
        one.commit(["a", "b", "c"])
    for seed in range(8):
        follow(world, runner, {"a": 1, "b": 1, "c": 1}, seed, causal=True)
    assert runner.replays == 16


@every_paged
def test_mixed_batches(name: str, variant: str | None) -> None:
    world = world_of(name, variant, AttentionCGSupport.ALWAYS)
    size = BatchDescriptor(num_tokens=64, num_reqs=4, max_seq_len=MOST)
    runner = captured(world, size, tokens=CHUNK, causal=True)
    for seed, lengths in enumerate(({"a": 7}, {"a": 1, "b": 24}, {"c": 16}, {"a": 1, "b": 1, "c": 1})):
        follow(world, runner, lengths, seed, causal=True)
    assert runner.replays == 8


@every_paged
def test_steps_do_not_wait_for_the_device(name: str, variant: str | None) -> None:
    world = world_of(name, variant, AttentionCGSupport.UNIFORM_BATCH)
    runner = captured(world, uniform(CHUNK, 1), tokens=CHUNK)
    follow(world, runner, {"video": CHUNK}, 0, causal=False)
    world.open({"video": CHUNK})
    inputs = world.tensors(CHUNK, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            runner(inputs, {"self": world.common(["video"])})
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_paged
def test_debug_holds_replays_against_eager_steps(name: str, variant: str | None) -> None:
    world = world_of(name, variant, AttentionCGSupport.UNIFORM_BATCH)
    offset = torch.zeros((), device="cuda", dtype=torch.bfloat16)
    world.model.register_buffer("offset", offset)
    runner = GraphRunner.for_groups(
        lambda inputs, step: world.model(inputs["x"] + world.model.offset, inputs["shift"], step),
        world.groups,
        world.caches,
        device="cuda",
        input_axes={"shift": None},
        debug=True,
    )
    world.open({"video": CHUNK})
    inputs, common = world.tensors(CHUNK, 1), {"self": world.common(["video"])}
    runner.capture(uniform(CHUNK, 1), inputs, common)
    runner(inputs, common)
    offset.fill_(1.0)  # in place: the graph sees it
    runner(inputs, common)
    world.model.offset = torch.full_like(offset, 9.0)  # elsewhere: it does not
    with pytest.raises(RuntimeError, match="differs from an eager step"):
        runner(inputs, common)


def test_a_step_that_waits_cannot_be_captured() -> None:
    world = world_of("TORCH_SDPA", None, AttentionCGSupport.UNIFORM_BATCH)
    runner = GraphRunner.for_groups(
        lambda inputs, step: inputs["x"] * float(inputs["x"].sum()), world.groups, world.caches, device="cuda"
    )
    world.open({"video": CHUNK})
    inputs = {"x": world.tensors(CHUNK, 1)["x"]}
    with pytest.raises(RuntimeError, match="cannot be captured as a CUDA graph"):
        runner.capture(uniform(CHUNK, 1), inputs, {"self": world.common(["video"])})
