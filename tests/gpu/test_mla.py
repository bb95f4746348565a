"""Latent attention on a GPU: nothing waits for the device, graphs follow block tables, and far offsets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from omni_attn.backends.triton_mla import TritonMLABuilder
from omni_attn.facts import MLAAttentionSpec
from omni_attn.kv_cache import (
    BatchDescriptor,
    GraphRunner,
    PagedStep,
    allocate_kv_cache,
    init_attention_groups,
    make_step,
)
from omni_attn.mla_layer import MLAAttention
from omni_attn.ops.mla.plan import LatentPlan, MLATile
from omni_attn.testing.mla_scene import MLAScene, make_mla_scene
from tests.gpu.machine import on_gpu
from tests.gpu.test_paged_steps import without_waiting

pytestmark = on_gpu

HEADS, NOPE, VALUE = 16, 128, 128
SPEC = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, rope_size=64, dtype="bfloat16")
LENGTHS = ((1, 700), (1, 17), (1, 2100), (33, 900), (200, 200), (70, 333))
BACKENDS = pytest.mark.parametrize("backend", ["TRITON_ATTN", "TORCH_SDPA", None], ids=str)


def scene_of(lengths: Any = LENGTHS, heads: int = HEADS, **how: Any) -> MLAScene:
    sizes = {"num_heads": heads, "nope": NOPE, "value": VALUE}
    return make_mla_scene(lengths, spec=SPEC, dtype=torch.bfloat16, device="cuda", **sizes, **how)


def layer_of(scene: MLAScene, backend: str | None = "TRITON_ATTN", **needs: Any) -> MLAAttention:
    return MLAAttention(
        scene.query.shape[1],
        role="self",
        kv_cache=SPEC,
        qk_nope_head_size=NOPE,
        v_head_size=VALUE,
        kv_b_proj=scene.kv_b_proj,
        prefix="layer",
        config=backend,
        **needs,
    )


def step_of(scene: MLAScene, layer: MLAAttention) -> PagedStep:
    groups = init_attention_groups([layer], {"self": SPEC}, torch.device("cuda"))
    cache = scene.pages.empty_cache()
    layer.impl.update_kv_cache(*scene.history, cache, scene.pages.history_slots)
    return make_step(groups, {"self": scene.common}, {"layer": cache})


def inputs_of(scene: MLAScene) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return scene.query, scene.latent, scene.rope_key


@BACKENDS
def test_nothing_waits(backend: str | None) -> None:
    """Builder and layer, decodes and chunks of earlier tokens."""
    scene = scene_of()
    layer = layer_of(scene, backend, workspace=512)
    output = layer(*inputs_of(scene), step_of(scene, layer))  # kernels load once, and wait for that
    groups = init_attention_groups([layer], {"self": SPEC}, torch.device("cuda"))
    cache = step_of(scene, layer)["layer"].kv_cache
    torch.cuda.synchronize()
    with without_waiting("cuda"):
        step = make_step(groups, {"self": scene.common}, {"layer": cache})
        again = layer(*inputs_of(scene), step)
    assert torch.equal(output, again)
    wanted = scene.expected(scale=(NOPE + 64) ** -0.5)
    torch.testing.assert_close(output.double(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("heads", [4, 16, 40, 128])
@pytest.mark.parametrize("splits", [1, 2, 7, 32])
def test_splits(heads: int, splits: int) -> None:
    """However the keys are split, the result is the same up to rounding; empty splits count nothing."""
    scene = scene_of(((1, 1), (1, 33), (1, 700), (1, 1024)), heads)
    tile = MLATile(64, 32, 8, 3) if heads > 16 else MLATile(16, 32, 8, 3)
    plan = dict.fromkeys((2, 4), LatentPlan(tile, splits))
    with patch.object(TritonMLABuilder, "plan_decode", return_value=plan):
        layer = layer_of(scene)
        output = layer(*inputs_of(scene), step_of(scene, layer))
    wanted = scene.expected(scale=(NOPE + 64) ** -0.5)
    torch.testing.assert_close(output.double(), wanted, atol=2e-2, rtol=2e-2)


def test_offsets_beyond_32_bits() -> None:
    """A page that lies more than 2**31 numbers behind the first one."""
    scene = scene_of(((1, 33), (3, 20)))
    layer = layer_of(scene)
    near = layer(*inputs_of(scene), step_of(scene, layer))
    shift = 2**31 // (SPEC.block_size * SPEC.head_size) + 1
    far = torch.full(
        (shift + scene.pages.num_pages, SPEC.block_size, SPEC.head_size),
        float("nan"),
        dtype=torch.bfloat16,
        device="cuda",
    )
    layer.impl.update_kv_cache(*scene.history, far, scene.pages.history_slots + shift * SPEC.block_size)
    common = scene.common.replace(
        block_table=scene.common.block_table + shift,
        slot_mapping=scene.pages.slot_mapping + shift * SPEC.block_size,
    )
    groups = init_attention_groups([layer], {"self": SPEC}, torch.device("cuda"))
    step = make_step(groups, {"self": common}, {"layer": far})
    assert torch.equal(layer(*inputs_of(scene), step), near)


@BACKENDS
def test_graphs_follow_block_tables(backend: str | None) -> None:
    """Decodes captured once, replayed for fewer requests in other pages: the same as eager steps."""
    scene = scene_of(((1, 4),) * 8)
    layer = layer_of(scene, backend)
    groups = init_attention_groups([layer], {"self": SPEC}, torch.device("cuda"))
    cache = allocate_kv_cache(SPEC, 400, "NHD", "cuda").normal_()

    def model(inputs: Mapping[str, torch.Tensor], step: PagedStep) -> torch.Tensor:
        out: torch.Tensor = layer(inputs["query"], inputs["latent"], inputs["rope"], step)
        return out

    def inputs(made: MLAScene) -> dict[str, torch.Tensor]:
        return dict(zip(("query", "latent", "rope"), inputs_of(made), strict=True))

    def common_of(made: MLAScene) -> Any:
        table = made.common.block_table
        return made.common.replace(block_table=nn.functional.pad(table, (0, 40 - table.shape[1])))

    runner = GraphRunner.for_groups(model, groups, {"layer": cache}, device="cuda")
    size = BatchDescriptor(num_tokens=8, num_reqs=8, query_len=1, max_seq_len=600)
    runner.capture(size, inputs(scene), {"self": common_of(scene)})
    for seed, lengths in enumerate((((1, 5), (1, 600), (1, 77)), ((1, 300),) * 8, ((1, 1),))):
        made = scene_of(lengths, seed=seed, page_seed=seed)
        common, kept = common_of(made), cache.clone()
        step = make_step(groups, {"self": common}, {"layer": kept})
        wanted = layer(*inputs_of(made), step)
        found = runner(inputs(made), {"self": common})
        torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
        assert torch.equal(cache, kept)
    assert runner.replays == 3
