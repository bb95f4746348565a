"""MLAAttention: construction, selection, its place among groups and graphs, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter

from omni_attn import MLAAttention, PagedAttention, attention_report, collect_attention_requests
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.backends.torch_sdpa_mla import TorchMLAImpl
from omni_attn.backends.triton_mla import TritonMLAImpl
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.facts import AttentionCGSupport, FullAttentionSpec, MLAAttentionSpec
from omni_attn.kv_cache import (
    BatchDescriptor,
    CommonAttentionMetadata,
    GraphRunner,
    PagedCall,
    PagedStep,
    allocate_kv_cache,
    cudagraph_supports,
    init_attention_groups,
    make_step,
    map_to_kernel_blocks,
    paged_layers,
    split_pages,
)
from omni_attn.selector import use_attention_config
from omni_attn.testing import MLABackendConformance, fake_device
from tests.kv_cache.counted import CPU, make_common

HEADS, NOPE, VALUE = 3, 12, 10
SPEC = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, rope_size=8, dtype="float32")
SM_90 = fake_device("sm_90", packages={"triton": "3.6.0", "flash-attn": "2.8.3", "fa3-fwd": "0.0.1"})


def projection(heads: int = HEADS, **how: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, heads * (NOPE + VALUE), **{"bias": False} | how).requires_grad_(False)


def layer(prefix: str = "a", **needs: Any) -> MLAAttention:
    stated: dict[str, Any] = {
        "role": "self",
        "kv_cache": SPEC,
        "qk_nope_head_size": NOPE,
        "v_head_size": VALUE,
        "kv_b_proj": needs.pop("kv_b_proj", None) or projection(),
    }
    return MLAAttention(needs.pop("num_heads", HEADS), prefix=prefix, **stated | needs)


def tensors(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    shapes = ((tokens, HEADS, NOPE + 8), (tokens, 16), (tokens, 8))
    query, latent, rope_key = (torch.randn(shape, generator=numbers) for shape in shapes)
    return query, latent, rope_key


def step_of(one: MLAAttention, lengths: list[tuple[int, int]], **changes: Any) -> PagedStep:
    groups = init_attention_groups([one], {one.cache_group: SPEC}, CPU)
    common = make_common(lengths, **{"causal": True} | changes)
    cache = allocate_kv_cache(SPEC, 32, "NHD", CPU)
    return make_step(groups, {one.cache_group: common}, {one.prefix: cache})


class Reference(MLABackendConformance):
    """Tools of the conformance class for steps of any lengths."""

    block_sizes = (4,)
    heads, latent, rope, nope, value = 2, 8, 4, 6, 5

    def get_backend(self) -> type[TorchSDPABackend]:
        return TorchSDPABackend


del MLABackendConformance  # pytest would collect it here as well
REFERENCE = Reference()
Reference.__test__ = False  # type: ignore[attr-defined]


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 17)).map(lambda x: (x[0], x[0] + x[1])),
        min_size=1,
        max_size=5,
    ),
    block_size=st.sampled_from([1, 3, 4, 16]),
    workspace=st.sampled_from([1, 5, 16, 64]),
    threshold=st.integers(1, 4),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_step_equals_the_open_form(
    lengths: list[tuple[int, int]],
    block_size: int,
    workspace: int,
    threshold: int,
    padding: tuple[int, int],
    seed: int,
) -> None:
    lengths.sort(key=lambda x: x[0] > threshold)  # decodes first
    scene = REFERENCE.scene(
        lengths,
        block_size=block_size,
        seed=seed,
        page_seed=seed,
        padded_reqs=padding[0],
        padded_tokens=padding[1],
    )
    output = REFERENCE.attend(scene, workspace=workspace, decode_threshold=threshold)
    REFERENCE.close(output, scene.expected(scale=REFERENCE.scale, decode_threshold=threshold))


def test_float64_and_the_identity_of_both_forms() -> None:
    """The same tokens as decodes and as prefills: the same numbers, up to float64's own rounding."""
    spec = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, rope_size=8, dtype="float64")
    query, latent, rope_key = (x.double() for x in tensors(5))
    outputs = []
    for threshold in (1, 5):
        one = layer(kv_cache=spec, kv_b_proj=projection().double(), decode_threshold=threshold)
        groups = init_attention_groups([one], {"self": spec}, CPU)
        cache = allocate_kv_cache(spec, 8, "NHD", CPU)
        step = make_step(groups, {"self": make_common([(5, 5)], causal=True)}, {"a": cache})
        outputs.append(one(query, latent, rope_key, step))
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


def test_the_up_projection_stays_the_models() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv_b_proj = projection()
            self.attn = layer(kv_b_proj=self.kv_b_proj)

    model = Model()
    assert list(model.state_dict()) == ["kv_b_proj.weight"]
    twin = copy.deepcopy(model)
    assert twin.attn.kv_b_proj is twin.kv_b_proj is not model.kv_b_proj
    inputs, step = tensors(2), step_of(model.attn, [(1, 1), (1, 1)])
    before = model.attn(*inputs, step)
    model.load_state_dict({"kv_b_proj.weight": -model.kv_b_proj.weight})
    torch.testing.assert_close(model.attn(*inputs, step), -before)  # of one key alone only its value counts


def test_selection() -> None:
    assert isinstance(layer().impl, TorchMLAImpl)
    with use_attention_config(None, platform=SM_90):
        one = layer()
        assert isinstance(one.impl, TritonMLAImpl)
        assert one.selection is not None and one.selection.backend == "TRITON_ATTN"
        assert attention_report(one).rows[0].impl == "TritonMLAImpl"
        with pytest.raises(BackendRejectedError, match="needs a paged cache of MLA's latents"):
            layer(config="FLASH_ATTN")
        with pytest.raises(BackendRejectedError, match=r"found head_size=1088.*not supported by MLA"):
            MLAAttention(
                2,
                role="self",
                kv_cache=MLAAttentionSpec(
                    block_size=4, num_kv_heads=1, head_size=1088, rope_size=64, dtype="float32"
                ),
                qk_nope_head_size=8,
                v_head_size=8,
                kv_b_proj=nn.Linear(1024, 32, bias=False),
                prefix="wide",
                config="TRITON_ATTN",
            )
    with pytest.raises(BackendRejectedError, match="batch invariance"):
        layer(config="TORCH_SDPA", batch_invariant=True)
    with collect_attention_requests() as found:
        stated = layer()
    assert found[0].request.head_size == 24 and found[0].request.softmax_scale == (NOPE + 8) ** -0.5
    with pytest.raises(MetadataError, match="only stated its request"):
        stated(*tensors(1), None)


@pytest.mark.parametrize(
    ("needs", "kind", "text"),
    [
        ({"kv_b_proj": projection(bias=True)}, ValueError, "and a bias"),
        ({"kv_b_proj": projection(heads=2)}, ValueError, r"needs \[66, 16\]"),
        ({"prefix": ""}, ValueError, "a prefix"),
        ({"v_head_size": 0}, ValueError, "v_head_size=0"),
        ({"kv_sharing_target": "b"}, NotImplementedError, "kv_sharing_target"),
        (
            {"kv_cache": FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, dtype="float32")},
            ValueError,
            "MLAAttentionSpec",
        ),
        ({"impl_overrides": {"TORCH_SDPA": TritonMLAImpl}}, TypeError, "must subclass"),
    ],
)
def test_layers_that_are_not_built(needs: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        layer(**needs)


@pytest.mark.parametrize(
    ("place", "wrong", "text"),
    [
        (0, (3, 2, 20), "query has shape"),
        (0, (2, HEADS, 20), r"query has 2 tokens|latent has shape"),
        (1, (3, 15), "latent has shape"),
        (2, (3, 2, 8), "rope_key has shape"),
        (2, torch.float64, "rope_key is torch.float64"),
    ],
)
def test_calls_that_do_not_fit(place: int, wrong: Any, text: str) -> None:
    one = layer()
    step, inputs = step_of(one, [(3, 5)]), list(tensors(3))
    inputs[place] = torch.zeros(wrong) if isinstance(wrong, tuple) else inputs[place].to(wrong)
    with pytest.raises(MetadataError, match=text):
        one(*inputs, step)


def test_calls_of_another_size() -> None:
    one = layer()
    step = step_of(one, [(3, 5)])
    with pytest.raises(MetadataError, match="query has 2 tokens, and the step 3"):
        one(*tensors(2), step)
    with pytest.raises(MetadataError, match="its cache has shape"):
        one(*tensors(3), step["a"]._replace(kv_cache=torch.zeros(8, 4, 23)))
    with pytest.raises(MetadataError, match="has no part in this step"):
        layer("b")(*tensors(3), step)
    longer = one(*tensors(5), step)
    assert not longer[3:].any(), "rows behind the step are padding"
    assert torch.equal(longer[:3], one(*(x[:3] for x in tensors(5)), step))


def test_what_its_page_shows_runs() -> None:
    page = (Path(__file__).parents[2] / "docs/mla.md").read_text(encoding="utf-8")
    shown: dict[str, Any] = {}
    exec(compile(page.partition("```python\n")[2].partition("```")[0], "docs/mla.md", "exec"), shown)
    assert shown["output"].shape == (1, 4, 16) and bool(shown["output"].isfinite().all())


@pytest.mark.parametrize("lengths", [[(1, 9), (1, 20)], [(1, 9), (4, 30)], [(5, 5)]])
def test_a_compiled_call_is_one_graph(lengths: list[tuple[int, int]]) -> None:
    one = layer(compile=True)
    step, inputs = step_of(one, lengths), tensors(sum(count for count, _ in lengths))
    with torch.no_grad():
        compiled = torch.compile(lambda *given: one(*given, step), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), one(*inputs, step))


def test_equal_layers_compile_once() -> None:
    """Their names stand in error texts alone."""
    compiled = CompileCounter()  # type: ignore[no-untyped-call]
    inputs = tensors(5)

    class Block(nn.Module):
        def __init__(self, attention: MLAAttention) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, inputs: tuple[torch.Tensor, ...], call: PagedCall) -> torch.Tensor:
            made: torch.Tensor = self.attention(*inputs, call)
            return made * 2

    torch._dynamo.reset()
    for number in range(3):
        one = layer(f"blocks.{number}", compile=True)
        call = step_of(one, [(3, 6), (2, 2)])[one.prefix]
        with torch.no_grad():
            wanted = one(*inputs, call) * 2
            block = torch.compile(Block(one), fullgraph=True, backend=compiled)
            torch.testing.assert_close(block(inputs, call), wanted)
    assert compiled.frame_count == 1


def test_gradients_are_refused() -> None:
    one = layer(kv_b_proj=projection().requires_grad_(True))
    step = step_of(one, [(3, 5)])
    with pytest.raises(MetadataError, match="no backward"):
        one(*tensors(3), step)
    with torch.no_grad():
        one(*tensors(3), step)


def test_groups_with_layers_over_keys_and_values() -> None:
    """Two page tables in one model; equal layers share one metadata object."""
    full = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32")
    text = PagedAttention(4, 8, role="text", num_kv_heads=2, kv_cache=full, causal=True, prefix="text")
    others = [layer("a"), layer("b"), layer("c", softmax_scale=0.5), layer("d", decode_threshold=2)]
    layers = [*others, text]
    assert paged_layers(nn.ModuleList(layers)) == tuple(layers)
    groups = init_attention_groups(layers, {"self": SPEC, "text": full}, CPU)
    assert [group.layer_names for group in groups] == [("a", "b"), ("c",), ("d",), ("text",)]
    assert cudagraph_supports(groups[:1]) == {"TORCH_SDPA": AttentionCGSupport.UNIFORM_BATCH}
    common = make_common([(1, 5), (2, 9)], causal=True)
    caches = {one.prefix: allocate_kv_cache(one.kv_cache_spec, 32, "NHD", CPU) for one in layers}
    step = make_step(groups, {"self": common, "text": common}, caches)
    assert step["a"].metadata is step["b"].metadata is not step["c"].metadata
    assert step["a"].metadata.split == (1, 1, 1, 2) and step["d"].metadata.split == (2, 0, 3, 0)
    with pytest.raises(RuntimeError, match="batch_invariant mode is not supported"):
        init_attention_groups(others, {"self": SPEC}, CPU, batch_invariant=True)


def test_smaller_pages_for_the_kernel() -> None:
    """A page of the table as several of the kernel's: the same result."""
    one, other = layer("a"), layer("a")
    inputs, common = tensors(3), make_common([(1, 7), (2, 9)], causal=True)
    outputs = []
    for chosen, size in ((one, 4), (other, 2)):
        cache = allocate_kv_cache(SPEC, 16, "NHD", CPU).normal_(generator=torch.Generator().manual_seed(3))
        groups = init_attention_groups([chosen], {"self": SPEC}, CPU)
        if size != SPEC.block_size:
            chosen.take_kernel_block_size(size)
        builder = chosen.make_builder(chosen.kernel_spec, ("a",), CPU)
        table = map_to_kernel_blocks(common.block_table, SPEC.block_size // size)
        call = make_step(groups, {"self": common}, {"a": cache})["a"]
        call = call._replace(
            metadata=builder.build(common.replace(block_table=table)), kv_cache=split_pages(cache, size)
        )
        outputs.append(chosen(*inputs, call))
    torch.testing.assert_close(*outputs)


def test_a_runner_replays_decodes_with_changing_tables() -> None:
    """Captured once; every batch of decodes that fits gives what an eager step gives, padding included."""
    one = layer()
    groups = init_attention_groups([one], {"self": SPEC}, CPU)
    cache = allocate_kv_cache(SPEC, 64, "NHD", CPU).normal_(generator=torch.Generator().manual_seed(3))

    def model(inputs: Mapping[str, torch.Tensor], step: PagedStep) -> torch.Tensor:
        out: torch.Tensor = one(inputs["q"], inputs["c"], inputs["r"], step)
        return out

    runner = GraphRunner.for_groups(model, groups, {"a": cache}, device=CPU)
    size = BatchDescriptor(num_tokens=4, num_reqs=4, query_len=1, max_seq_len=20)
    names = ("q", "c", "r")

    def common_of(lengths: list[tuple[int, int]], first_page: int) -> CommonAttentionMetadata:
        made = make_common(lengths, first_page=first_page, causal=True)
        return made.replace(
            block_table=nn.functional.pad(made.block_table, (0, 5 - made.block_table.shape[1]))
        )

    runner.capture(size, dict(zip(names, tensors(4), strict=True)), {"self": common_of([(1, 4)] * 4, 1)})
    for seed, lengths in enumerate(([(1, 5), (1, 17), (1, 1)], [(1, 9)], [(1, 3), (1, 4), (1, 20), (1, 8)])):
        inputs = tensors(len(lengths), seed)
        common = common_of(lengths, 1 + 7 * seed)
        kept = cache.clone()
        wanted = one(*inputs, make_step(groups, {"self": common}, {"a": kept}))
        found = runner(dict(zip(names, inputs, strict=True)), {"self": common})
        torch.testing.assert_close(found, wanted)
        assert torch.equal(cache, kept)
    assert runner.replays == 3 and not runner.eager
