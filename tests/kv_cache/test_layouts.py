"""One layout for all backends of a model, settled once; and caches that lie as it says."""

from __future__ import annotations

import pytest
import torch

from omni_attn.errors import ConfigError
from omni_attn.facts.kv_cache import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec
from omni_attn.kv_cache import (
    KVCacheLayout,
    allocate_kv_cache,
    common_kv_cache_layouts,
    resolve_kv_cache_layout,
)

NHD, HND, EITHER, HND_FIRST = ("NHD",), ("HND",), ("NHD", "HND"), ("HND", "NHD")


@pytest.mark.parametrize(
    ("supported", "expected"),
    [
        ({}, EITHER),
        ({"A": None}, EITHER),
        ({"A": None, "B": HND}, HND),
        ({"A": HND_FIRST, "B": HND_FIRST}, HND_FIRST),
        ({"A": HND_FIRST, "B": None}, HND_FIRST),
        ({"A": EITHER, "B": HND}, HND),
        ({"A": EITHER, "B": HND_FIRST}, EITHER),  # a tie keeps the order of the names
        ({"A": EITHER, "B": HND_FIRST, "C": HND_FIRST}, HND_FIRST),
    ],
)
def test_what_all_backends_take(
    supported: dict[str, tuple[str, ...] | None], expected: tuple[str, ...]
) -> None:
    assert common_kv_cache_layouts(supported) == expected
    for unasked in (None, "auto"):
        assert resolve_kv_cache_layout(supported, unasked) == expected[0]
    for layout in expected:
        assert resolve_kv_cache_layout(supported, layout) == layout


def test_no_layout_satisfies_them_all() -> None:
    with pytest.raises(
        ConfigError, match=r"No KV cache layout satisfies .*: A takes NHD; B takes HND; C takes NHD, HND\."
    ):
        resolve_kv_cache_layout({"A": NHD, "B": HND, "C": None}, "NHD")
    with pytest.raises(ConfigError, match="A takes none; B takes NHD"):
        resolve_kv_cache_layout({"A": (), "B": NHD})


def test_a_choice_that_a_backend_does_not_take() -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache.layout HND does not satisfy .*: A takes NHD; B takes .* Write NHD,"
    ):
        resolve_kv_cache_layout({"A": NHD, "B": EITHER}, "HND")


@pytest.mark.parametrize("name", ["nhd", "LBNHC", ""])
def test_an_unknown_layout(name: str) -> None:
    layout = KVCacheLayout()
    spec = FullAttentionSpec(block_size=2, num_kv_heads=1, head_size=2, dtype="float32")
    for call in (
        lambda: resolve_kv_cache_layout({}, name),
        lambda: resolve_kv_cache_layout({"A": (name,)}),
        lambda: layout.record(name),
        lambda: allocate_kv_cache(spec, 2, name, "cpu"),
    ):
        with pytest.raises(ConfigError, match=f"Unknown KV cache layout '{name}'.*Known: NHD, HND"):
            call()


def test_a_layout_is_settled_once() -> None:
    layout = KVCacheLayout()
    with pytest.raises(ConfigError, match="has not been resolved"):
        _ = layout.value
    assert layout.resolve({"A": HND_FIRST}) == layout.value == "HND"
    assert layout.record("HND") == layout.resolve({"A": HND_FIRST}, "HND") == "HND"
    with pytest.raises(ConfigError, match="NHD was asked for, and it is already resolved to HND"):
        layout.record("NHD")
    with pytest.raises(ConfigError, match="already resolved"):
        layout.resolve({"A": EITHER}, "NHD")
    assert layout.value == "HND"


def test_backends_that_come_later_have_to_take_the_settled_layout() -> None:
    layout = KVCacheLayout()
    layout.resolve({"A": HND_FIRST})
    assert layout.resolve({"B": EITHER}) == "HND"
    with pytest.raises(ConfigError, match="HND does not satisfy every backend of this model: B takes NHD"):
        layout.resolve({"B": NHD})


@pytest.mark.parametrize("layout", EITHER)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "fp8_e4m3"])
def test_a_cache_lies_as_its_layout_says(layout: str, dtype: str) -> None:
    spec = FullAttentionSpec(block_size=8, num_kv_heads=3, head_size=4, dtype=dtype)
    cache = allocate_kv_cache(spec, 5, layout, "cpu")
    assert cache.shape == (5, 2, 8, 3, 4)
    assert cache.element_size() * cache.numel() == 5 * spec.page_bytes
    assert cache.dtype == (torch.float8_e4m3fn if dtype == "fp8_e4m3" else getattr(torch, dtype))
    assert not cache.float().any()
    memory = cache.permute(1, 0, 2, 3, 4) if layout == "NHD" else cache.permute(1, 0, 3, 2, 4)
    assert memory.is_contiguous()


def test_a_cache_of_latents_has_no_heads() -> None:
    spec = MLAAttentionSpec(block_size=8, num_kv_heads=1, head_size=12, rope_size=4, dtype="bfloat16")
    cache = allocate_kv_cache(spec, 5, "HND", "cpu")
    assert cache.shape == (5, 8, 12) and cache.is_contiguous()


def test_what_cannot_be_allocated() -> None:
    with pytest.raises(ValueError, match="value_head_size=0: a KV cache needs at least 1"):
        FullAttentionSpec(block_size=8, num_kv_heads=3, head_size=4, value_head_size=0, dtype="float32")
    spec = FullAttentionSpec(block_size=8, num_kv_heads=3, head_size=4, dtype="float32")
    with pytest.raises(ValueError, match="num_blocks=1: block 0 is never given out"):
        allocate_kv_cache(spec, 1, "NHD", "cpu")
    uneven = KVCacheSpec(block_size=8, num_kv_heads=3, head_size=4, value_head_size=2, dtype="float32")
    with pytest.raises(ValueError, match="head_size=4 and value_head_size=2"):
        allocate_kv_cache(uneven, 4, "NHD", "cpu")
