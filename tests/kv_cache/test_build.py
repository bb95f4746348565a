"""How often builders are asked: once per group and step, and once for all steps in which nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from omni_attn.backends.paged import CommonAttentionMetadata
from omni_attn.errors import MetadataError
from omni_attn.facts import KVCacheSpec
from omni_attn.kv_cache import AttentionGroup, build_attention_metadata, init_attention_groups, make_step
from omni_attn.kv_cache.layouts import allocate_kv_cache
from tests.kv_cache.counted import CPU, SPEC, Tally, layer, make_common, paged_backend

SPECS: dict[str, KVCacheSpec] = {"self": SPEC, "cross": SPEC}


@pytest.fixture
def counted() -> Iterator[Tally]:
    with paged_backend("COUNTED", rebinds=True) as tally:
        yield tally


@pytest.fixture
def groups(counted: Tally) -> tuple[AttentionGroup, ...]:
    """Two groups over one page table, one over another; the last differs from the first in its page table alone."""
    layers = [layer("a"), layer("b"), layer("wide", window=(3, 0)), layer("x", role="cross")]
    return init_attention_groups(layers, SPECS, CPU)


def pair(**changes: object) -> dict[str, CommonAttentionMetadata]:
    step = make_common([(2, 5), (1, 3)], **changes)
    pages = make_common([(2, 5), (1, 3)], first_page=9)
    other = step.replace(block_table=pages.block_table, slot_mapping=pages.slot_mapping)
    return {"self": step, "cross": other}


def test_once_per_group_and_not_again(groups: tuple[AttentionGroup, ...], counted: Tally) -> None:
    commons = pair()
    first = build_attention_metadata(groups, commons)
    assert (len(counted.builds), counted.rebinds) == (2, 1)
    for _ in range(4):  # denoising steps of a chunk
        again = build_attention_metadata(groups, commons)
    assert (len(counted.builds), counted.rebinds) == (2, 1)
    assert all(again[name] is first[name] for name in first)
    assert first["a"] is first["b"] and len({id(made) for made in first.values()}) == 3


def test_taken_over_pages_alone(groups: tuple[AttentionGroup, ...]) -> None:
    commons = pair()
    made = build_attention_metadata(groups, commons)
    assert made["x"].block_table is commons["cross"].block_table
    assert made["x"].slot_mapping is commons["cross"].slot_mapping
    assert made["x"].mask is made["a"].mask and made["wide"].mask is not made["a"].mask
    assert made["a"].block_table is commons["self"].block_table, "what is shared was not changed"


@pytest.mark.parametrize(
    "change",
    [
        {"causal": torch.zeros(2, dtype=torch.int32)},
        {"max_seq_len": 7},
        {"seq_lens": torch.tensor([5, 2], dtype=torch.int32)},
        {"slot_mapping": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_nothing_is_taken_over_where_more_differs(
    groups: tuple[AttentionGroup, ...], counted: Tally, change: dict[str, object]
) -> None:
    commons = pair()
    commons["cross"] = commons["cross"].replace(**change)
    build_attention_metadata(groups, commons)
    assert (len(counted.builds), counted.rebinds) == (3, 0)


def test_nothing_is_taken_over_where_the_builder_cannot() -> None:
    with paged_backend("PLAIN", rebinds=False) as tally:
        layers = [layer("a", "PLAIN"), layer("x", "PLAIN", role="cross")]
        build_attention_metadata(init_attention_groups(layers, SPECS, CPU), pair())
        assert (len(tally.builds), tally.rebinds) == (2, 0)


@pytest.mark.parametrize("field", ["query_start_loc", "seq_lens", "block_table", "slot_mapping"])
def test_a_tensor_overwritten_in_place_is_noticed(
    groups: tuple[AttentionGroup, ...], counted: Tally, field: str
) -> None:
    commons = pair()
    build_attention_metadata(groups[:1], commons)
    getattr(commons["self"], field).copy_(getattr(commons["self"], field))
    build_attention_metadata(groups[:1], commons)
    build_attention_metadata(groups[:1], commons)
    assert len(counted.builds) == 2


def test_equal_steps_of_the_same_tensors_are_one(groups: tuple[AttentionGroup, ...], counted: Tally) -> None:
    commons = pair()
    build_attention_metadata(groups[:1], commons)
    build_attention_metadata(groups[:1], {"self": commons["self"].replace()})
    assert len(counted.builds) == 1
    build_attention_metadata(groups[:1], {"self": commons["self"].replace(max_query_len=3)})
    assert len(counted.builds) == 2
    build_attention_metadata(groups[:1], commons)
    assert len(counted.builds) == 3, "buffers hold the last step only"


def test_a_models_own_fields_count(groups: tuple[AttentionGroup, ...], counted: Tally) -> None:
    step = make_common([(2, 5)], kind=Film, guidance=1.0)
    build_attention_metadata(groups[:1], {"self": step})
    build_attention_metadata(groups[:1], {"self": step.replace(guidance=2.0)})
    assert [made.guidance for made in counted.builds if isinstance(made, Film)] == [1.0, 2.0]


@dataclass(frozen=True, eq=False, kw_only=True)
class Film(CommonAttentionMetadata):
    """A step of a model of its own."""

    guidance: float = 1.0


def test_in_inference_mode_another_object_is_another_step(
    groups: tuple[AttentionGroup, ...], counted: Tally
) -> None:
    with torch.inference_mode():
        commons = pair()
        for _ in range(3):
            build_attention_metadata(groups[:1], commons)
        assert len(counted.builds) == 1
        build_attention_metadata(groups[:1], {"self": commons["self"].replace()})
    assert len(counted.builds) == 2


def test_micro_batches_build_for_themselves(counted: Tally) -> None:
    groups = init_attention_groups([layer("a")], SPECS, CPU, num_ubatches=2)
    step = make_common([(2, 5), (1, 3)])
    parts = [step.sliced((0, 1)), step.sliced((1, 2))]
    for _ in range(2):
        made = [
            build_attention_metadata(groups, {"self": part}, ubatch=n)["a"] for n, part in enumerate(parts)
        ]
    assert len(counted.builds) == 2 and made[0] is not made[1]


def test_what_a_graph_reads_is_built_for_each_replay(
    groups: tuple[AttentionGroup, ...], counted: Tally
) -> None:
    """It reads each group's own buffers, which a product that was taken over would leave as they are."""
    commons = pair()
    for replays in range(1, 3):
        build_attention_metadata(groups, commons, capture=True)
        assert (len(counted.captures), len(counted.builds), counted.rebinds) == (3 * replays, 0, 0)


def test_a_captured_kernel_table_keeps_its_address() -> None:
    spec = replace(SPEC, block_size=8)
    with paged_backend("FOUR", block_sizes=(4,), rebinds=True):
        groups = init_attention_groups([layer("a", "FOUR", kv_cache=spec)], {"self": spec}, CPU)
        first, later = ({"self": make_common([(2, 30)], block_size=8, first_page=page)} for page in (1, 7))
        captured = build_attention_metadata(groups, first, capture=True)["a"].block_table
        assert captured.tolist() == [[2, 3, 4, 5, 6, 7, 8, 9]]
        assert build_attention_metadata(groups, later)["a"].block_table.data_ptr() != captured.data_ptr()
        again = build_attention_metadata(groups, later, capture=True)["a"].block_table
        assert again.data_ptr() == captured.data_ptr()
        assert captured.tolist() == [[14, 15, 16, 17, 18, 19, 20, 21]]


def test_steps_that_a_kernel_cannot_express() -> None:
    with paged_backend("NARROW", causal_by_request=False, non_causal=False, host_lengths=True):
        groups = init_attention_groups([layer("a", "NARROW", causal=True)], SPECS, CPU)
        step = make_common([(2, 5)], causal=True)
        assert build_attention_metadata(groups, {"self": step})
        mixed = torch.ones(1, dtype=torch.int32)
        for changes, words in (
            ({"causal": mixed}, "one bool for all"),
            ({"causal": False}, "the step is not causal"),
            ({"seq_lens_cpu": None}, "state seq_lens_cpu"),
        ):
            with pytest.raises(MetadataError, match=words):
                build_attention_metadata(groups, {"self": step.replace(**changes)})


def test_a_step_that_contradicts_its_layers(groups: tuple[AttentionGroup, ...]) -> None:
    with pytest.raises(MetadataError, match=r"COUNTED \(a and 1 more\): the step says causal=True"):
        build_attention_metadata(groups[:1], {"self": make_common([(2, 5)], causal=True)})


def test_what_is_missing(groups: tuple[AttentionGroup, ...]) -> None:
    commons = pair()
    with pytest.raises(MetadataError, match=r"'x' uses the page table 'cross'.*it has 'self'"):
        build_attention_metadata(groups, {"self": commons["self"]})
    caches = {name: allocate_kv_cache(SPEC, 20, "NHD", CPU) for name in ("a", "b", "wide")}
    with pytest.raises(MetadataError, match="'x': no KV cache was given for 'x'"):
        make_step(groups, commons, caches)
    step = make_step(groups[:1], commons, caches)
    with pytest.raises(MetadataError, match="'wide' has no part in this step, which was made for a, b"):
        step["wide"]
    with pytest.raises(ValueError, match="'a' is in two groups"):
        build_attention_metadata((groups[0], groups[0]), commons)


def test_a_table_of_another_width_is_built_for(groups: tuple[AttentionGroup, ...], counted: Tally) -> None:
    """What a builder took from one table's width, an upper bound of the keys, need not hold for a narrower one."""
    commons = pair(max_seq_len=40)
    wide = torch.nn.functional.pad(commons["self"].block_table, (0, 8))
    commons["self"] = commons["self"].replace(block_table=wide)
    caches = {name: torch.zeros(30, 2, 4, 2, 8) for group in groups for name in group.layer_names}
    step = make_step(groups, commons, caches)
    assert (len(counted.builds), counted.rebinds) == (3, 0)
    last = layer("x", role="cross")
    query, new = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    assert last(query, new, new, step).isfinite().all()
