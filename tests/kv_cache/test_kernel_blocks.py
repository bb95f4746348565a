"""Page sizes that all kernels take, and pages handed over as smaller ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_attn.errors import ConfigError
from omni_attn.facts.kv_cache import BlockSizes, FullAttentionSpec, MLAAttentionSpec, MultipleOf
from omni_attn.kv_cache import (
    allocate_kv_cache,
    get_block_table_width,
    map_to_kernel_blocks,
    plan_block_sizes,
    select_common_block_size,
    split_pages,
)


def m(base: int) -> MultipleOf:
    return MultipleOf(base=base)


@pytest.mark.parametrize(
    ("block_size", "backends", "expected"),
    [
        (128, [(m(32),), (64, m(16))], 128),
        (256, [(128, 64), (64, 32)], 64),
        (96, [(m(16),), (32, 64)], 32),
        (64, [(64,)], 64),
        (1560, [(m(8),), (m(1),)], 1560),
        (1, [(m(1),)], 1),
        (7, [], 7),
    ],
)
def test_common_sizes(block_size: int, backends: list[BlockSizes], expected: int) -> None:
    named = {f"B{i}": sizes for i, sizes in enumerate(backends)}
    assert select_common_block_size(block_size, named) == expected


@pytest.mark.parametrize(
    ("block_size", "backends", "words"),
    [
        (
            31,
            {"A": (m(16),), "B": (32, 64)},
            "31: A takes multiples of 16; B takes 32 or 64. Write kv_cache.block_size 32",
        ),
        (8, {"A": (m(16),)}, "8: A takes multiples of 16. Write kv_cache.block_size 16"),
        (24, {"A": (m(16),)}, "block_size 16 or 32"),
        (96, {"A": (128,), "B": (m(48),)}, "No page size suits them all: choose other backends"),
    ],
)
def test_no_common_size(block_size: int, backends: dict[str, BlockSizes], words: str) -> None:
    with pytest.raises(ConfigError, match="No common block size for") as error:
        select_common_block_size(block_size, backends)
    assert words in str(error.value)


SIZES = st.lists(
    st.one_of(st.sampled_from([4, 6, 8, 16]), st.sampled_from([1, 2, 4, 6]).map(m)), min_size=1, max_size=3
).map(tuple)


@given(block_size=st.integers(1, 64), backends=st.lists(SIZES, max_size=3))
def test_a_common_size_is_one_that_each_backend_takes(block_size: int, backends: list[BlockSizes]) -> None:
    def takes(sizes: BlockSizes, size: int) -> bool:
        return any(size % s.base == 0 if isinstance(s, MultipleOf) else s == size for s in sizes)

    exact = {s for sizes in backends for s in sizes if isinstance(s, int)}
    good = [s for s in {block_size, *exact} if block_size % s == 0 and all(takes(b, s) for b in backends)]
    named = {f"B{i}": sizes for i, sizes in enumerate(backends)}
    if good:
        assert select_common_block_size(block_size, named) == max(good)
        return
    with pytest.raises(ConfigError) as error:
        select_common_block_size(block_size, named)
    _, written, advice = str(error.value).partition("Write kv_cache.block_size ")
    for size in advice.split(" or ") if written else []:
        select_common_block_size(int(size), named)


@pytest.mark.parametrize(
    ("groups", "asked", "expected"),
    [
        ({"self": {"A": (m(1),)}}, {"unit": 1560}, (8, {"self": 8})),
        ({"self": {"A": (m(1),)}}, {"unit": 3600}, (16, {"self": 16})),
        ({"self": {"A": (m(1),)}}, {"unit": 6}, (6, {"self": 6})),
        ({"self": {"A": (m(1),)}}, {}, (16, {"self": 16})),
        ({"self": {"A": (m(64),)}}, {}, (64, {"self": 64})),
        ({"self": {"A": (m(16),)}, "cross": {"B": (32,)}}, {}, (32, {"self": 32, "cross": 32})),
        ({"self": {"A": (m(1),)}, "cross": {"B": (4,)}}, {"unit": 24}, (8, {"self": 8, "cross": 4})),
        ({"self": {"A": (m(3),)}}, {"unit": 24}, (12, {"self": 12})),
        ({"self": {"A": (m(3),)}}, {"unit": 30}, (15, {"self": 15})),
        ({"self": {"A": (m(1),)}}, {"unit": 1560, "block_size": 1560}, (1560, {"self": 1560})),
        ({}, {}, (16, {})),
    ],
)
def test_a_plan_sees_all_groups(
    groups: dict[str, dict[str, BlockSizes]], asked: dict[str, int], expected: tuple[int, dict[str, int]]
) -> None:
    plan = plan_block_sizes(groups, **asked)
    assert (plan.block_size, plan.kernel_block_sizes) == expected


@pytest.mark.parametrize(
    ("groups", "asked", "words"),
    [
        (
            {"self": {"A": (m(16),)}},
            {"unit": 1560},
            "frame of 1560 tokens: A of group 'self' takes multiples of 16.",
        ),
        (
            {"self": {"A": (m(1),)}},
            {"unit": 1560, "block_size": 16},
            "16 tokens do not divide a frame of 1560",
        ),
        ({"self": {"A": (m(1),)}}, {"unit": 1560, "block_size": 16}, "Write 15 or 13"),
        ({"self": {"A": (m(16),)}}, {"unit": 1560, "block_size": 16}, "Choose other backends, or leave"),
        ({"self": {"A": (128,), "B": (m(48),)}}, {}, "No common block size for this model"),
        ({"self": {"A": (m(16),)}}, {"block_size": 8}, "No common block size for 8"),
        ({"self": {"A": (m(16),)}}, {"block_size": 0}, "A page has at least 1"),
    ],
)
def test_no_plan(groups: dict[str, dict[str, BlockSizes]], asked: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_block_sizes(groups, **asked)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "width"),
    [
        ((1, 8), 16),
        ((16, 8), 16),
        ((17, 8), 32),
        ((3, 128), 3),
        ((3, 1560), 16),
        ((5, 8, None), 5),
        ((5, 96), 8),
    ],
)
def test_widths(arguments: tuple[int, ...], width: int) -> None:
    assert get_block_table_width(*arguments) == width


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 8), "num_blocks=0"), ((1, 0), "block_size=0"), ((1, 1, 0), "token_alignment=0")],
)
def test_bad_widths(arguments: tuple[int, ...], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        get_block_table_width(*arguments)


@pytest.mark.parametrize("latent", [False, True])
@given(data=st.data())
def test_smaller_pages_hold_the_same_tokens(latent: bool, data: st.DataObject) -> None:
    """A token is found by its slot, and by the rewritten table, where it was."""
    kernel, ratio = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    common: dict[str, Any] = {"block_size": kernel * ratio, "dtype": "float32"}
    if latent:
        cache = allocate_kv_cache(
            MLAAttentionSpec(num_kv_heads=1, head_size=3, rope_size=1, **common), 7, "NHD", "cpu"
        )
        at = (0, 1)
    else:
        cache = allocate_kv_cache(FullAttentionSpec(num_kv_heads=2, head_size=3, **common), 7, "NHD", "cpu")
        at = (0, 2)
    cache.copy_(torch.arange(cache.numel()).view(cache.shape))
    small = split_pages(cache, kernel)
    assert small.data_ptr() == cache.data_ptr()
    table = torch.tensor(
        data.draw(st.lists(st.permutations(range(7)), min_size=1, max_size=2)), dtype=torch.int32
    )
    mapped = map_to_kernel_blocks(table, ratio)
    tokens = cache.movedim(at, (0, 1))[table].flatten(1, 2)
    assert torch.equal(small.movedim(at, (0, 1))[mapped].flatten(1, 2), tokens)
    slots = torch.arange(7 * kernel * ratio)
    where = small.movedim(at, (0, 1))[slots // kernel, slots % kernel]
    assert torch.equal(where, cache.movedim(at, (0, 1)).flatten(0, 1))


def test_a_rewritten_table_keeps_its_address() -> None:
    out = torch.full((2, 7), -5, dtype=torch.int32)
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    mapped = map_to_kernel_blocks(table, 3, out=out)
    assert mapped.data_ptr() == out.data_ptr()
    assert mapped.tolist() == [[9, 10, 11, 0, 1, 2], [3, 4, 5, 6, 7, 8]]
    assert out[:, 6].tolist() == [-5, -5]
    assert map_to_kernel_blocks(table, 1) is table
    assert map_to_kernel_blocks(table, 1, out=out)[1].tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"out is \[2, 7\]: 2 rows of 2 pages in 4 parts need \[2, 8\]"):
        map_to_kernel_blocks(table, 4, out=out)


def test_pages_that_cannot_be_split() -> None:
    spec = FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=4, dtype="float32")
    cache = allocate_kv_cache(spec, 3, "HND", "cpu")
    with pytest.raises(
        ConfigError, match=r"8 tokens cannot be split into pages of 4.*layout NHD, or kv_cache.block_size 4"
    ):
        split_pages(cache, 4)
    with pytest.raises(ConfigError, match=r"8 tokens cannot be split into pages of 3.*a multiple of 3"):
        split_pages(cache, 3)
    assert split_pages(cache, 8) is cache
    one_head = allocate_kv_cache(
        FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=4, dtype="float32"), 3, "HND", "cpu"
    )
    assert split_pages(one_head, 4).shape == (6, 2, 4, 1, 4)
