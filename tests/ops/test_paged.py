"""Paged attention in torch, the definition; writing into pages; and plans of the Triton kernel, mere arithmetic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_attn.backends.torch_sdpa_paged import TorchSDPAPagedBuilder, TorchSDPAPagedImpl
from omni_attn.facts.kv_cache import FullAttentionSpec
from omni_attn.ops.paged import write
from omni_attn.ops.paged.plan import choose_splits, choose_tile, plan_step
from omni_attn.ops.paged.write import FP8, write_in_torch, write_kv_cache
from omni_attn.testing.paged_scene import make_scene

H200 = {"shared_memory": 227 * 1024, "num_sms": 132}
VIDEO = {"num_tokens": 4680, "num_reqs": 1, "max_query_len": 4680, "max_seq_len": 32760}
DECODE = {"num_tokens": 64, "num_reqs": 64, "max_query_len": 1, "max_seq_len": 4096}


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=4),
    block_size=st.sampled_from((1, 3, 8, 16)),
    kv_heads=st.sampled_from((1, 2, 6)),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(st.integers(-1, 20), st.integers(-1, 20))),
    padded=st.integers(0, 3),
    layout=st.sampled_from(("NHD", "HND")),
)
def test_paged_is_dense_after_gathering(
    batch: list[tuple[int, int]],
    block_size: int,
    kv_heads: int,
    causal: bool,
    window: tuple[int, int] | None,
    padded: int,
    layout: str,
) -> None:
    """Requests of (query tokens, earlier tokens) over pages in any order, all else NaN; padding gives zeros."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=kv_heads, head_size=4, dtype="float64")
    lengths = [(count, count + earlier) for count, earlier in batch]
    geometry = {
        "num_heads": 6,
        "num_kv_heads": kv_heads,
        "head_size": 4,
        "softmax_scale": 0.5,
        "window": window,
    }
    how = {"dtype": torch.float64, "causal": causal, "padded_reqs": padded // 2, "padded_tokens": padded}
    scene = make_scene(lengths, spec=spec, num_heads=6, **how)
    cache = scene.empty_cache(layout)
    impl = TorchSDPAPagedImpl(kv_cache_spec=spec, **geometry)
    builder = TorchSDPAPagedBuilder(
        kv_cache_spec=spec, layer_names=("a",), device=torch.device("cpu"), **geometry
    )
    if scene.history_slots.numel():
        impl.update_kv_cache(*scene.history, cache, scene.history_slots)
    impl.update_kv_cache(scene.key, scene.value, cache, scene.slot_mapping)
    output = torch.full_like(scene.query, float("nan"))
    impl.forward(scene.query, None, None, cache, builder.build(scene.common), output)
    expected = scene.expected(causal=causal, window=window)
    torch.testing.assert_close(output[: len(expected)], expected, rtol=0, atol=1e-12)
    assert not output[len(expected) :].any()


# --- writing


def pages(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((5, 2, 4, 2, 3), float("nan")).to(dtype)


def test_a_slot_behind_the_last_page_is_refused_with_both_numbers() -> None:
    key = torch.randn(2, 2, 3)
    with pytest.raises(ValueError, match=r"slot 20 .* 5 pages of 4 tokens"):
        write_kv_cache(key, key, pages(), torch.tensor([3, 20]))


@pytest.mark.parametrize(
    ("key", "value", "slots", "words"),
    [
        ((2, 2, 4), (2, 2, 4), [0, 1], "(5, 2, 4, 2, 3)"),
        ((2, 2, 3), (3, 2, 3), [0, 1], "(3, 2, 3)"),
        ((2, 2, 3), (2, 2, 3), [0, 1, 2], "one per token of 2"),
        ((2, 2, 3), (2, 2, 3), [0.0, 1.0], "int64"),
    ],
)
def test_shapes_that_disagree_are_refused(
    key: tuple[int, ...], value: tuple[int, ...], slots: list[float], words: str
) -> None:
    with pytest.raises(ValueError) as caught:
        write_kv_cache(torch.zeros(key), torch.zeros(value), pages(), torch.tensor(slots))
    assert words in str(caught.value)


@pytest.mark.parametrize("slots", [[5, -1, 0, -1], [-1, -1, 7, 6], [-1] * 4, [3, 2, 1, 0]], ids=str)
def test_the_form_without_host_counts_writes_the_same(
    slots: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other devices, and a compiler, write without asking how many slots are named."""
    key, value = torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    counted, blind = pages(), pages()
    write_in_torch(key, value, counted, torch.tensor(slots))
    monkeypatch.setattr(write, "is_traced", lambda _: True)
    write_in_torch(key, value, blind, torch.tensor(slots))
    assert torch.equal(counted.nan_to_num(9.0), blind.nan_to_num(9.0))
    assert int(counted.isfinite().sum()) == 2 * 6 * sum(slot >= 0 for slot in slots)


def test_fp8_keeps_the_largest_number_for_larger_ones_and_nan_for_nan() -> None:
    key = torch.tensor([1e9, float("nan"), -500.0]).expand(1, 2, 3)
    cache = pages(FP8)
    write_kv_cache(key, key / 1000, cache, torch.tensor([6]), value_scale=1e-3)
    for part in cache[1, :, 2].float().unbind(0):
        assert part[0, 0] == 448.0 and part[0, 1].isnan() and part[0, 2] == -448.0


# --- plans


def test_a_batch_of_equal_requests_finds_its_tiles_without_a_search() -> None:
    plan = plan_step(**VIDEO, ratio=1, num_kv_heads=12, head_size=128, item_bytes=2, **H200)
    assert plan.num_tiles == plan.tiles_each == -(-4680 // plan.tile.block_m)
    ragged = {"num_tokens": 1000, "num_reqs": 4, "max_query_len": 900, "max_seq_len": 4000}
    plan = plan_step(**ragged, ratio=4, num_kv_heads=8, head_size=128, item_bytes=2, **H200)
    assert plan.tiles_each == 0 and plan.num_tiles == 1000 * 4 // plan.tile.block_m + 4


def test_a_decode_step_fills_small_tiles_with_grouped_heads() -> None:
    plan = plan_step(**DECODE, ratio=4, num_kv_heads=8, head_size=128, item_bytes=2, **H200)
    assert plan.tile.block_m == 16 and plan.num_tiles == 64 and plan.tiles_each == 1


def test_few_long_requests_are_split_and_many_are_not() -> None:
    one = plan_step(
        **{**DECODE, "num_tokens": 1, "num_reqs": 1},
        ratio=4,
        num_kv_heads=8,
        head_size=128,
        item_bytes=2,
        **H200,
    )
    assert one.splits == 4096 // 64 // 4
    assert choose_splits(10_000, rows=40_000, steps=512, num_sms=132, resident=2) == 1
    assert choose_splits(1, rows=1, steps=3, num_sms=132, resident=2) == 1


def test_long_prefills_bring_small_pages_together() -> None:
    shape = {"ratio": 1, "num_kv_heads": 12, "head_size": 128, "item_bytes": 2, "page_size": 8, **H200}
    assert plan_step(**VIDEO, **shape).gathered == 2**15 >= VIDEO["max_seq_len"]
    assert plan_step(**VIDEO, **{**shape, "page_size": 64}).gathered == 0  # tensor memory fetches such pages
    assert plan_step(**VIDEO, **shape, invariant=True).gathered == 0
    assert plan_step(**DECODE, **shape).gathered == 0
    many = {**VIDEO, "num_reqs": 100, "num_tokens": 100 * VIDEO["num_tokens"]}
    assert plan_step(**many, **shape).gathered == 0  # 20 GB


def test_an_invariant_plan_has_one_tile_and_no_splits() -> None:
    shape = {"ratio": 4, "num_kv_heads": 8, "head_size": 128, "item_bytes": 2, "invariant": True}
    plans = [plan_step(**step, **shape, **H200) for step in (VIDEO, DECODE)]
    assert plans[0].tile == plans[1].tile and {plan.splits for plan in plans} == {1}


@pytest.mark.parametrize("room", [227, 163, 99], ids="{} KiB".format)
@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("head_size", [16, 64, 128, 256])
def test_tiles_fit_the_shared_memory(room: int, item_bytes: int, head_size: int) -> None:
    for rows in (1, 4, 17, 4680, None):
        tile = choose_tile(rows, head_size, item_bytes, room * 1024)
        assert tile.shared_bytes(head_size, item_bytes) <= room * 1024
        assert rows is None or tile.block_m >= 16
