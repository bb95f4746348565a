"""BlockPartition: any cut of a sequence, packed into slots and back."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from omni_attn.errors import MetadataError
from omni_attn.ops.block_sparse.partition import BlockPartition

#: Sizes of blocks, what their capacity has beyond the largest, a seed for the order.
cuts = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 3), st.integers(0, 999))


def shuffled(sizes: list[int], spare: int = 0, seed: int = 0) -> BlockPartition:
    order = list(range(sum(sizes)))
    random.Random(seed).shuffle(order)
    return BlockPartition.of(torch.tensor(order), sizes, max(sizes) + spare, "cpu")


@given(cuts)
@example(([1], 0, 0))
@example(([1, 1, 1], 2, 1))
def test_every_token_has_one_place_in_the_valid_part_of_its_block(cut: tuple[list[int], int, int]) -> None:
    blocks = shuffled(*cut)
    sizes, capacity = cut[0], blocks.capacity
    assert blocks.sizes == tuple(sizes) and blocks.num_blocks == len(sizes) and blocks.tokens == sum(sizes)
    assert blocks.offsets.tolist() == [sum(sizes[:block]) for block in range(len(sizes) + 1)]
    assert blocks.places[blocks.order.long()].tolist() == list(range(sum(sizes)))
    slots = blocks.slots().tolist()
    assert len(set(slots)) == sum(sizes)
    for token, slot in enumerate(slots):
        block = int(blocks.block_of[token])
        assert slot // capacity == block and slot % capacity < sizes[block]
    for dtype in (blocks.block_of.dtype, blocks.places.dtype, blocks.slots().dtype):
        assert dtype == torch.int64


@given(cuts, st.integers(0, 5))
def test_packing_puts_zeros_behind_a_block_and_unpacking_takes_them_away(
    cut: tuple[list[int], int, int], wider: int
) -> None:
    blocks = shuffled(*cut)
    capacity = blocks.capacity + wider
    tensor = 1.0 + torch.arange(2 * blocks.tokens * 3).view(2, blocks.tokens, 3)
    packed = blocks.pack(tensor, capacity)
    assert packed.shape == (2, blocks.num_blocks * capacity, 3) and packed.dtype == tensor.dtype
    by_hand = torch.zeros_like(packed)
    order, place = blocks.order.tolist(), 0
    for block, size in enumerate(blocks.sizes):
        for slot in range(size):
            by_hand[:, block * capacity + slot] = tensor[:, order[place]]
            place += 1
    assert torch.equal(packed, by_hand)
    assert torch.equal(blocks.unpack(packed, capacity), tensor)


def test_unpacking_ignores_what_lies_behind_a_block() -> None:
    blocks = shuffled([3, 1, 2], spare=1)
    tensor = torch.randn(1, 6, 2, 4)
    packed = blocks.pack(tensor)
    used = torch.zeros(packed.shape[1], dtype=torch.bool)
    used[blocks.slots()] = True
    packed[:, ~used] = float("nan")
    assert torch.equal(blocks.unpack(packed), tensor)


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(2, 4, 6, 3).transpose(1, 2), torch.randn(2, 6, 5)[..., ::2], torch.randn(6).expand(3, 6)],
    ids=["transposed", "every other", "expanded"],
)
def test_packing_takes_views_and_leaves_them_alone(tensor: torch.Tensor) -> None:
    blocks, before = shuffled([3, 1, 2]), tensor.clone()
    assert torch.equal(blocks.pack(tensor), blocks.pack(before))
    assert torch.equal(blocks.unpack(blocks.pack(tensor)), before)
    assert torch.equal(tensor, before)


def test_two_packed_tensors_share_nothing() -> None:
    blocks = shuffled([3, 1, 2], spare=1)
    first = blocks.pack(torch.ones(1, 6, 2))
    kept = first.clone()
    blocks.pack(torch.full((1, 6, 2), 7.0))
    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    ("tokens", "capacity", "sizes"), [(10, 4, (4, 4, 2)), (8, 4, (4, 4)), (3, 64, (3,)), (1, 1, (1,))]
)
def test_blocks_in_order(tokens: int, capacity: int, sizes: tuple[int, ...]) -> None:
    blocks = BlockPartition.in_order(tokens, capacity, "cpu")
    assert blocks.sizes == sizes and blocks.capacity == capacity
    assert blocks.order.tolist() == list(range(tokens))


@pytest.mark.parametrize("sizes", [[4, 4], [4, 4, 3], [5, 5], [4, 0, 4, 2], [12, -2], []])
def test_sizes_that_do_not_fit_are_refused(sizes: list[int]) -> None:
    with pytest.raises(MetadataError):
        BlockPartition.of(torch.arange(10), sizes, 4, "cpu")


def test_the_refusal_names_both_numbers() -> None:
    with pytest.raises(MetadataError, match=r"(?s)(?=.*\b8\b)(?=.*\b10\b)"):
        BlockPartition.of(torch.arange(10), [4, 4], 4, "cpu")
