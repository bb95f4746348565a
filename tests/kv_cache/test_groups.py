"""Which layers share a metadata object, and what models may not ask of their layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from omni_attn.errors import BackendRejectedError, ConfigError
from omni_attn.facts import (
    AttentionCGSupport,
    FullAttentionSpec,
    KVCacheSpec,
    MultipleOf,
    SlidingWindowSpec,
)
from omni_attn.kv_cache import (
    build_attention_metadata,
    cudagraph_supports,
    init_attention_groups,
    paged_layers,
)
from omni_attn.paged_layer import PagedAttention
from tests.kv_cache.counted import CPU, SPEC, Tally, layer, make_common, paged_backend

WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32", window=8)
SPECS: dict[str, KVCacheSpec] = {"self": SPEC}


@pytest.fixture(autouse=True)
def counted() -> Iterator[Tally]:
    with paged_backend("COUNTED", rebinds=True) as tally:
        yield tally


def groups_of(*layers: PagedAttention, specs: dict[str, KVCacheSpec] | None = None) -> list[tuple[str, ...]]:
    return [group.layer_names for group in init_attention_groups(layers, specs or SPECS, CPU)]


def test_equal_layers_get_one_object() -> None:
    layers = [layer(f"blocks.{n}") for n in range(3)]
    groups = init_attention_groups(layers, SPECS, CPU)
    metadata = build_attention_metadata(groups, {"self": make_common([(2, 5)])})
    assert list(metadata) == ["blocks.0", "blocks.1", "blocks.2"]
    assert len({id(made) for made in metadata.values()}) == 1
    (group,) = groups
    assert group.builder().layer_names == group.layer_names == ("blocks.0", "blocks.1", "blocks.2")
    assert group.builder().device == CPU and group.builder().kv_cache_spec == SPEC


@pytest.mark.parametrize(
    "needs",
    [
        {"num_heads": 2},  # scratch memory of a builder goes by query heads
        {"window": (3, 0)},
        {"softmax_scale": 0.5},
        {"causal": True},
        {"config": "OTHER"},
        {"config": {"default": {"backend": "VARIED", "variant": "one"}}},
    ],
    ids=lambda needs: next(iter(needs)),
)
def test_whatever_changes_the_product_makes_a_group(needs: dict[str, object]) -> None:
    with paged_backend("OTHER"), paged_backend("VARIED", variants=("one", "two")):
        assert groups_of(layer("a"), layer("b", **needs), layer("c")) == [("a", "c"), ("b",)]


def test_variants_and_own_impls_make_groups() -> None:
    with paged_backend("VARIED", variants=("one", "two")):
        one, two = ({"default": {"backend": "VARIED", "variant": name}} for name in ("one", "two"))
        assert groups_of(layer("a", config=one), layer("b", config=two)) == [("a",), ("b",)]
    impl = layer("z").impl
    assert impl is not None
    own = type("Own", (type(impl),), {})
    assert groups_of(layer("a"), layer("b", impl_overrides={"COUNTED": own})) == [("a",), ("b",)]


def test_what_changes_nothing_makes_none() -> None:
    assert groups_of(layer("a"), layer("b", softmax_scale=8**-0.5)) == [("a", "b")]
    assert groups_of(layer("a"), layer("b", role="other", cache_group="self")) == [("a", "b")]


def test_page_tables_part_groups() -> None:
    specs = {"self": SPEC, "cross": SPEC, "window": WINDOW}
    layers = [
        layer("a"),
        layer("b", role="cross"),
        layer("c", cache_group="window", kv_cache=WINDOW),
        layer("d"),
    ]
    groups = init_attention_groups(layers, specs, CPU)
    assert [(group.cache_group, group.layer_names) for group in groups] == [
        ("self", ("a", "d")),
        ("cross", ("b",)),
        ("window", ("c",)),
    ]
    assert len({group.group_id for group in groups}) == 3


def test_a_builder_for_each_micro_batch() -> None:
    (group,) = init_attention_groups([layer("a")], SPECS, CPU, num_ubatches=2)
    assert group.builder(0) is not group.builder(1)
    with pytest.raises(ValueError, match=r"micro-batch 2 of group .*: it has 2"):
        group.builder(2)
    with pytest.raises(ValueError, match="num_ubatches=0"):
        init_attention_groups([layer("a")], SPECS, CPU, num_ubatches=0)


def test_layers_are_found_in_a_model() -> None:
    model = nn.ModuleList([layer("a"), nn.Linear(2, 2), layer("b")])
    assert [found.prefix for found in paged_layers(model)] == ["a", "b"]


def test_names_that_are_not_unique() -> None:
    with pytest.raises(ValueError, match="the name 'a' twice among 3 paged layers"):
        groups_of(layer("a"), layer("b"), layer("a"))


def test_page_tables_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="uses the page table 'cross', and there are specs for 'self'"):
        groups_of(layer("a", role="cross"))
    larger = replace(SPEC, block_size=8)
    with pytest.raises(ValueError, match=r"block_size=4.*page table 'self' is made for .*block_size=8"):
        groups_of(layer("a"), specs={"self": larger})


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([("a", "a", {})], "is the layer itself"),
        ([("a", "z", {})], "no paged layer has that name; there are a"),
        ([("a", "b", {}), ("b", None, {})], "runs later"),
        ([("a", None, {}), ("b", "a", {}), ("c", "b", {})], "keeps none of its own: name 'a'"),
        (
            [("a", None, {}), ("b", "a", {"kv_cache": WINDOW, "cache_group": "window"})],
            "whose type is full, and its own is sliding_window",
        ),
        ([("a", None, {}), ("b", "a", {"cache_group": "cross"})], "state the same cache_group"),
    ],
)
def test_caches_that_cannot_be_shared(
    layers: list[tuple[str, str | None, dict[str, object]]], words: str
) -> None:
    made = [layer(name, kv_sharing_target=target, **needs) for name, target, needs in layers]
    with pytest.raises(ValueError, match=words):
        init_attention_groups(made, {"self": SPEC, "cross": SPEC, "window": WINDOW}, CPU)


def test_batch_invariance_has_to_be_answered() -> None:
    with pytest.raises(RuntimeError, match=r"batch_invariant mode is not supported by COUNTED.*layer 'a'"):
        init_attention_groups([layer("a")], SPECS, CPU, batch_invariant=True)
    with pytest.raises(BackendRejectedError, match="needs batch invariance"):
        layer("a", batch_invariant=True)
    with paged_backend("STEADY", invariant=True):
        steady = [layer("a", "STEADY"), layer("b", "STEADY", batch_invariant=True)]
        assert init_attention_groups(steady, SPECS, CPU, batch_invariant=True)


def test_kernels_get_pages_of_a_size_that_all_of_a_table_take() -> None:
    spec = replace(SPEC, block_size=32)
    with (
        paged_backend("EXACT", block_sizes=(8, 16)) as tally,
        paged_backend("EVERY", block_sizes=(MultipleOf(base=4),)),
    ):
        layers = [layer("a", "EVERY", kv_cache=spec), layer("b", "EXACT", kv_cache=spec)]
        groups = init_attention_groups(layers, {"self": spec}, CPU)
        assert {group.kernel_spec.block_size for group in groups} == {16}
        assert {group.kv_cache_spec.block_size for group in groups} == {32}
        assert [made.kernel_spec.block_size for made in layers] == [16, 16]
        assert all(made.impl is not None and made.impl.kv_cache_spec.block_size == 16 for made in layers)
        metadata = build_attention_metadata(groups, {"self": make_common([(2, 40)], block_size=32)})
        assert tally.builds[0].block_table.tolist() == [[2, 3, 4, 5]]
        assert metadata["b"].block_table.tolist() == [[2, 3, 4, 5]]


def test_no_page_size_suits_all_of_a_table() -> None:
    spec = replace(SPEC, block_size=16)
    with paged_backend("EIGHT", block_sizes=(8,)), paged_backend("SIXTEEN", block_sizes=(16,)):
        layers = [layer("a", "EIGHT", kv_cache=spec), layer("b", "SIXTEEN", kv_cache=spec)]
        with pytest.raises(
            ConfigError, match=r"No common block size for 16.*EIGHT takes 8; SIXTEEN takes 16"
        ):
            init_attention_groups(layers, {"self": spec}, CPU)


def test_support_of_cuda_graphs_by_backend() -> None:
    with paged_backend("ALL", cudagraph=AttentionCGSupport.ALWAYS):
        groups = init_attention_groups([layer("a"), layer("b", "ALL")], SPECS, CPU)
    assert cudagraph_supports(groups) == {
        "COUNTED": AttentionCGSupport.NEVER,
        "ALL": AttentionCGSupport.ALWAYS,
    }


def test_a_layer_that_was_only_asked() -> None:
    from omni_attn.selector import collect_attention_requests

    with collect_attention_requests() as found:
        asked = layer("a")
    assert [(one.prefix, one.request.kv_cache) for one in found] == [("a", SPEC)]
    with pytest.raises(ValueError, match="'a' only stated its request"):
        groups_of(asked)
    assert paged_layers(torch.nn.ModuleList([asked])) == (asked,)


def test_scales_of_a_loader_outlive_another_page_size() -> None:
    wide = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype="fp8_e4m3")
    fp8 = frozenset({"fp8_e4m3"})
    with paged_backend("SIXTEEN", block_sizes=(16,), cache_dtypes=fp8) as tally:
        loaded = layer("a", "SIXTEEN", kv_cache=wide, dtype="float32")
        loaded.impl.key_scale, loaded.impl.value_scale = 0.5, 0.25
        init_attention_groups([loaded], {"self": wide}, CPU)
    assert tally.impls == 2 and loaded.kernel_spec.block_size == 16
    assert (loaded.impl.key_scale, loaded.impl.value_scale) == (0.5, 0.25)


@pytest.mark.parametrize("window", [(8, 0), (20, 3)])
def test_a_window_beyond_what_its_cache_keeps(window: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError, match=rf"sees {window[0] + 1} tokens .* keeps window=8 .* state window=\(7, "
    ):
        layer("a", kv_cache=WINDOW, window=window)
    assert layer("a", kv_cache=WINDOW, window=(7, 0)).request.window == (7, 0)
