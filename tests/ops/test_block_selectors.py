"""Selectors against the published numbers, and against loops written from their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from omni_attn.errors import MetadataError
from omni_attn.ops.block_sparse.block_map import all_blocks, blocks_of_map
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.prefix_selector import prefix_dense_topk
from omni_attn.ops.block_sparse.subblock_selector import (
    subblock_budget,
    subblock_lse_topk,
    subblock_scores,
)
from omni_attn.ops.block_sparse.threshold_selector import rf_softmax_threshold
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.reference import reference_attention
from omni_attn.ops.video_tiles import partition, tile_sizes
from tests.ops.block_inputs import SCALE, as_lists, scores_between, token_mask, waves

SEGMENTS, GRID, TILE = (70, 5, 13), (5, 6, 7), (4, 4, 4)


def joint_blocks() -> BlockPartition:
    """Segments in chunks of 64, each with a tail of its own, then the video's tiles."""
    sizes = [min(64, length - start) for length in SEGMENTS for start in range(0, length, 64)]
    before = sum(SEGMENTS)
    order = torch.cat([torch.arange(before), partition(GRID, TILE) + before])
    return BlockPartition.of(order, sizes + tile_sizes(GRID, TILE), 64, "cpu")


# -- prefix_dense_topk

PUBLISHED = {
    "exempt": (
        ([0, 1, 2, 3, 10, 11], [0, 1, 2, 3, 6, 7]),
        (0.189848, 0.044979, -0.088053, -0.177086),
        (-62.844276674, 217.245714779),
    ),
    "compete": (
        ([2, 4, 5, 9, 10, 11], [0, 1, 6, 7, 8, 9]),
        (-0.064229, -0.159807, -0.211218, -0.199183),
        (169.634171282, 185.680677345),
    ),
}


@pytest.mark.parametrize("mode", PUBLISHED)
def test_prefix_dense_topk_gives_the_published_blocks(mode: str) -> None:
    rows, _, _ = PUBLISHED[mode]
    blocks = joint_blocks()
    assert blocks.sizes == (64, 6, 5, 13, 64, 48, 32, 24, 16, 12, 8, 6)
    query, key, _ = waves(298)
    selected = prefix_dense_topk(scores_between(query, key, blocks), 4, 2, compete=mode == "compete")
    assert as_lists(selected, 0)[4] == rows[0] and as_lists(selected, 1)[-1] == rows[1]
    assert as_lists(selected, 0)[:4] == [list(range(12))] * 4


@pytest.mark.parametrize("mode", PUBLISHED)
def test_prefix_dense_topk_gives_the_published_gated_output(mode: str) -> None:
    _, last, (total, squares) = PUBLISHED[mode]
    query, key, value = waves(298)
    s = torch.arange(298, dtype=torch.float64)[None, :, None, None]
    n = torch.arange(2, dtype=torch.float64)[None, None, :, None]
    gate = torch.sin(0.05 * s + 0.3 * n + 0.2 * torch.arange(8, dtype=torch.float64) + 0.1)
    blocks, executor = joint_blocks(), TorchExecutor()
    packed = executor.pack(query, key, value, blocks, blocks)
    scores = scores_between(query, key, blocks)
    selected = prefix_dense_topk(scores, 4, 2, compete=mode == "compete")
    coarse = (scores.softmax(-1) @ packed.means.value).transpose(1, 2)[:, blocks.block_of]
    output = executor.attend(packed, selected, SCALE) + gate * coarse
    first = (0.044751, 0.100166, 0.120123, 0.093696)
    torch.testing.assert_close(output[0, 0, 0, :4], torch.tensor(first).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(output[0, 297, 1, :4], torch.tensor(last).double(), atol=1e-6, rtol=0)
    assert output.sum().item() == pytest.approx(total, abs=1e-6)
    assert output.square().sum().item() == pytest.approx(squares, abs=1e-6)


def test_prefix_dense_topk_equals_a_loop() -> None:
    scores = torch.randn(2, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    scores = (scores * 2).round()  # with ties
    for prefix, topk, compete in ((0, 3, False), (2, 3, False), (2, 3, True), (4, 1, True), (9, 2, False)):
        selected = prefix_dense_topk(scores, prefix, topk, compete=compete)
        for item, head in ((0, 0), (1, 2)):
            for row, kept in enumerate(as_lists(selected, head, item)):
                line = scores[item, head, row].tolist()
                if row < prefix or topk >= 9 - prefix:
                    expected = list(range(9))
                elif compete:
                    expected = best(line, range(9), prefix + topk)
                else:
                    expected = [*range(prefix), *best(line, range(prefix, 9), topk)]
                assert kept == expected, (prefix, topk, compete, row)


def best(line: list[float], candidates: range, count: int) -> list[int]:
    return sorted(sorted(candidates, key=lambda block: (-line[block], block))[:count])


def test_prefix_dense_topk_keeps_everything_where_the_budget_covers_the_video() -> None:
    scores = torch.zeros(1, 1, 5, 5)
    for topk in (3, 99):
        assert as_lists(prefix_dense_topk(scores, 2, topk)) == [[0, 1, 2, 3, 4]] * 5


def test_prefix_dense_topk_takes_the_first_blocks_of_rows_that_cannot_be_ranked() -> None:
    scores = torch.arange(25.0).view(1, 1, 5, 5)
    scores[..., 2, 4], scores[..., 3, 2], scores[..., 4, 0] = float("nan"), float("inf"), float("nan")
    rows = as_lists(prefix_dense_topk(scores, 1, 2))
    assert rows[1:] == [[0, 3, 4], [0, 1, 2], [0, 1, 2], [0, 3, 4]]  # what is not ranked may be anything
    assert as_lists(prefix_dense_topk(scores, 1, 2, compete=True))[4] == [0, 1, 2]


@pytest.mark.parametrize(("prefix", "topk", "named"), [(6, 1, "6"), (-1, 1, "-1"), (1, 0, "topk 0")])
def test_prefix_dense_topk_names_numbers_out_of_range(prefix: int, topk: int, named: str) -> None:
    with pytest.raises(MetadataError, match=named):
        prefix_dense_topk(torch.zeros(1, 1, 5, 5), prefix, topk)


# -- subblock_lse_topk

SCORES = (
    (4.236587, 4.230762, 1.465849, 2.997888, 4.478620, 3.514034, -1.584912),
    (3.811424, -2.470089, 1.337162, 4.400536, 0.279095, -1.670415, 1.048176),
)
TOP_3 = (
    [[0, 1, 4], [2, 3, 5], [0, 1, 4], [2, 5, 6], [0, 3, 4], [2, 5, 6], [0, 2, 3]],
    [[0, 1, 4], [2, 3, 5], [0, 1, 4], [2, 5, 6], [0, 3, 4], [1, 2, 5], [0, 2, 3]],
)


def test_subblock_scores_are_the_published_ones() -> None:
    query, key, _ = waves(50)
    scores = subblock_scores(query, key, SCALE, block_q=8, block_k=8, cell=4)
    for row, expected in zip((0, 6), SCORES, strict=True):
        torch.testing.assert_close(
            scores[0, 0, row], torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0
        )
    for head, rows in enumerate(TOP_3):
        assert [best(line, range(7), 3) for line in scores[0, head].tolist()] == rows


def mean_of(vectors: list[list[float]]) -> list[float]:
    return [sum(channel) / len(vectors) for channel in zip(*vectors, strict=True)]


def loop_scores(query: torch.Tensor, key: torch.Tensor, block_q: int, block_k: int, cell: int) -> list[float]:
    """Scores of one head, [S, D] each, row by row, from the formula."""

    def cells(tokens: list[list[float]], start: int, block: int) -> list[list[float]]:
        own = tokens[start : start + block]
        return [mean_of(own[at : at + cell]) for at in range(0, len(own), cell)]

    queries, keys, scale = query.tolist(), key.tolist(), query.shape[-1] ** -0.5
    return [
        math.log(
            sum(
                math.exp(scale * sum(a * b for a, b in zip(q, k, strict=True)))
                for q in cells(queries, row, block_q)
                for k in cells(keys, column, block_k)
            )
        )
        for row in range(0, len(queries), block_q)
        for column in range(0, len(keys), block_k)
    ]


@pytest.mark.parametrize(("block_q", "block_k", "cell"), [(8, 8, 4), (4, 16, 4), (16, 32, 16), (32, 16, 8)])
def test_subblock_scores_equal_a_loop(block_q: int, block_k: int, cell: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 45, 4, 8, dtype=torch.float64, generator=generator)
    key = torch.randn(2, 70, 2, 8, dtype=torch.float64, generator=generator)
    scores = subblock_scores(query, key, SCALE, block_q=block_q, block_k=block_k, cell=cell)
    for item, head in ((0, 0), (1, 3)):  # two query heads share a key head
        expected = loop_scores(query[item, :, head], key[item, :, head // 2], block_q, block_k, cell)
        assert scores[item, head].flatten().tolist() == pytest.approx(expected, abs=1e-9)


def test_subblock_cells_are_rounded_to_the_dtype_of_the_inputs() -> None:
    query, key = (torch.randn(1, 16, 1, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    query, key = query.bfloat16(), key.bfloat16()
    cell = (query.float().mean(1) * SCALE).bfloat16().double() * key.float().mean(1).bfloat16().double()
    scores = subblock_scores(query, key, SCALE, block_q=16, block_k=16, cell=16)
    assert scores.dtype == torch.float32 and scores.item() == pytest.approx(cell.sum().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("sparsity", "candidates", "budget"),
    [(0.75, 100, 32), (0.75, 5, 5), (0.9, 33, 8), (0.9, 0, 0), (1.0, 40, 8)],
)
def test_subblock_budgets(sparsity: float, candidates: int, budget: int) -> None:
    assert subblock_budget(sparsity, candidates) == budget


def test_subblock_topk_protects_the_prefix_beside_its_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 100, 2, 8, dtype=torch.float64, generator=generator)
    key = torch.randn(1, 328, 2, 8, dtype=torch.float64, generator=generator)
    shape = {"block_q": 16, "block_k": 16}
    selected = subblock_lse_topk(query, key, SCALE, 0.75, protected_kv_prefix=17, **shape)
    scores = subblock_scores(query, key, SCALE, cell=16, **shape)
    assert scores.shape[-1] == 21  # two are protected; 5 of 19 become 8
    for head in range(2):
        expected = [[0, 1, *best(line, range(2, 21), 8)] for line in scores[0, head].tolist()]
        assert as_lists(selected, head) == expected


def test_subblock_topk_without_a_choice_is_dense() -> None:
    query, key, _ = waves(50)
    poisoned = torch.full_like(key, float("nan"))  # nothing is scored
    for prefix, sparsity in ((0, 0.75), (50, 0.99)):
        selected = subblock_lse_topk(
            query, poisoned, SCALE, sparsity, block_q=8, block_k=8, cell=4, protected_kv_prefix=prefix
        )
        assert as_lists(selected) == [list(range(7))] * 7


def test_subblock_topk_of_ties_and_of_rows_that_cannot_be_ranked() -> None:
    query, key = torch.ones(1, 32, 1, 8), torch.ones(1, 320, 1, 8)
    query[:, 20] = float("nan")
    selected = subblock_lse_topk(query, key, SCALE, 0.9, block_q=16, block_k=16)
    assert as_lists(selected) == [list(range(8))] * 2


def test_subblock_topk_names_what_does_not_fit() -> None:
    query, key, _ = waves(50)
    with pytest.raises(MetadataError, match=r"multiples of 16 .* blocks of 24"):
        subblock_lse_topk(query, key, SCALE, 0.5, block_q=24)
    with pytest.raises(MetadataError, match=r"at most 50 .* prefix of 51"):
        subblock_lse_topk(query, key, SCALE, 0.5, protected_kv_prefix=51)


# -- rf_softmax_threshold


def test_threshold_equals_a_loop() -> None:
    scores = torch.randn(2, 2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    scores = (scores * 2).round()  # with ties
    protected = torch.tensor([True, False, False, False, True, False, False])
    for keep in (1, 3, 7):
        selected = rf_softmax_threshold(scores, keep, protected)
        for item, head in ((0, 1), (1, 0)):
            for row, kept in enumerate(as_lists(selected, head, item)):
                weights = scores[item, head, row].softmax(-1).tolist()
                threshold = sorted(weights, reverse=True)[keep - 1]
                expected = [b for b in range(7) if weights[b] >= threshold or protected[b] or protected[row]]
                assert kept == expected and len(kept) >= keep


def test_threshold_keeps_all_equals_and_never_nothing() -> None:
    assert as_lists(rf_softmax_threshold(torch.zeros(1, 1, 3, 3), 1)) == [[0, 1, 2]] * 3
    far = torch.tensor([0.0, -500.0, -900.0]).expand(1, 1, 3, 3)  # whose softmax is 1, 0, 0
    assert as_lists(rf_softmax_threshold(far, 2)) == [[0, 1]] * 3
    broken = far.clone()
    broken[..., 1, 2] = float("nan")
    assert as_lists(rf_softmax_threshold(broken, 1))[1] == [0]


# -- what they share


def test_maps_become_lists() -> None:
    keep = torch.rand(2, 3, 5, 6, generator=torch.Generator().manual_seed(2)) > 0.5
    keep[0, 0, 0], keep[0, 0, 1] = False, True
    selected = blocks_of_map(keep)
    for item in range(2):
        for head in range(3):
            expected = [line.nonzero().flatten().tolist() for line in keep[item, head]]
            assert as_lists(selected, head, item) == expected
    assert as_lists(all_blocks((1, 1, 2, 3), torch.device("cpu"))) == [[0, 1, 2]] * 2


def selections() -> dict[str, SelectedBlocks]:
    generator = torch.Generator().manual_seed(7)
    query, key = (torch.randn(1, 130, 2, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    scores = scores_between(query, key, BlockPartition.in_order(130, 16, "cpu"))
    shape = {"block_q": 16, "block_k": 16}
    return {
        "prefix_dense_topk": prefix_dense_topk(scores, 2, 2),
        "prefix_dense_topk without prefix": prefix_dense_topk(scores, 0, 2),
        "subblock_lse_topk": subblock_lse_topk(query, key, SCALE, 0.9, **shape),
        "rf_softmax_threshold": rf_softmax_threshold(scores, 3, torch.arange(9) == 8),
    }


@pytest.mark.parametrize("name", selections())
def test_executors_take_every_selection(name: str) -> None:
    selected, blocks = selections()[name], BlockPartition.in_order(130, 16, "cpu")
    query, key, value = (
        torch.randn(1, 130, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        for n in range(3)
    )
    executor = TorchExecutor()
    output = executor.attend(executor.pack(query, key, value, blocks, blocks), selected, SCALE)
    expected = reference_attention(query, key, value, attn_mask=token_mask(selected, blocks))[0]
    torch.testing.assert_close(output, expected)
