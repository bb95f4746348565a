"""Skip-softmax by its definition: what is skipped, what is lost, and what stays exact."""

from __future__ import annotations

import math

import pytest
import torch

from omni_attn.ops.reference import reference_attention
from omni_attn.ops.skip_softmax import skip_softmax_attention

TILES = {"tile_queries": 4, "tile_keys": 4}


def scored(scores: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of one head whose scores are given (scale 1); the values are the unit vectors."""
    table = torch.tensor(scores, dtype=torch.float64)
    keys = table.shape[1]
    query, unit = table[None, :, None], torch.eye(keys, dtype=torch.float64)
    return query, unit[None, :, None], unit[None, :, None]


def run(scores: list[list[float]], threshold: float, **tiles: int) -> tuple[torch.Tensor, list[bool]]:
    """Weights [Sq, Sk], and whether each key tile of the first query tile was skipped."""
    output, skipped = skip_softmax_attention(
        *scored(scores), threshold=threshold, softmax_scale=1.0, **(TILES | tiles)
    )
    return output[0, :, 0], skipped[0, 0, 0].tolist()


def random_call(queries: int, keys: int, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, n, heads, 8, generator=generator) for n in (queries, keys, keys))
    return query, key, value


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5), (128, 128), (1, 1)])
def test_no_threshold_skips_nothing_and_is_exact(sizes: tuple[int, int], causal: bool) -> None:
    call = random_call(9, 14)
    tiles = dict(zip(TILES, sizes, strict=True))
    for threshold in (0.0, 1e-30):
        output, skipped = skip_softmax_attention(*call, threshold=threshold, causal=causal, **tiles)
        expected = reference_attention(*call, causal=causal)[0]
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        assert causal or not skipped.any()


def test_grouped_heads_and_a_scale() -> None:
    query, _, _ = random_call(5, 8, heads=4)
    _, key, value = random_call(5, 8, heads=2)
    output = skip_softmax_attention(query, key, value, threshold=0.0, softmax_scale=0.3, **TILES)[0]
    expected = reference_attention(query, key, value, softmax_scale=0.3)[0]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def test_one_is_the_border_where_every_row_lies_below_its_maximum() -> None:
    below = [[1.0, 0.0, 0.9, 0.0], [2.0, 0.0, 0.0, 1.9]]
    assert run(below, 1.0, tile_queries=2, tile_keys=2)[1] == [False, True]
    equal = [[1.0, 0.0, 1.0, 0.0], [2.0, 0.0, 0.0, 1.9]]  # strictly: equality keeps the tile
    assert run(equal, 1.0, tile_queries=2, tile_keys=2)[1] == [False, False]
    above = [[1.0, 0.0, 1.1, 0.0], [2.0, 0.0, 0.0, 1.9]]
    assert run(above, 1.0, tile_queries=2, tile_keys=2)[1] == [False, False]


def test_above_one_the_running_maximum_lags() -> None:
    """A tile that raises the maximum by less than ln(threshold) is skipped, and leaves the maximum where it was."""
    raised = math.log(2.0) - 0.01
    scores = [[0.0, 0.0, raised, 0.0, 2 * raised, 0.0]]
    weights, skipped = run(scores, 2.0, tile_queries=1, tile_keys=2)
    assert skipped == [False, True, False]  # the third is held against 0, not against the skipped tile
    assert not weights[0, 2:4].any() and weights[0, 4] > weights[0, 0]


def test_below_one_a_skipped_tile_loses_at_most_its_share() -> None:
    threshold, keys = 0.1, 4
    scores = [[3.0, 0.0, 0.0, 0.0, 0.6, 0.5, 0.4, 0.3]]
    weights, skipped = run(scores, threshold, tile_queries=1)
    assert skipped == [False, True]
    exact = torch.softmax(torch.tensor(scores, dtype=torch.float64), -1)
    lost = exact[0, 4:].sum() / exact[0, 0]  # relative to the running maximum's weight
    assert 0 < lost <= keys * threshold
    torch.testing.assert_close(weights[0, :4], exact[0, :4] / exact[0, :4].sum(), rtol=0, atol=1e-12)


def test_one_row_keeps_the_tile_for_all() -> None:
    scores = [[9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 9.0, 0.0]]
    together, kept = run(scores, 0.5, tile_queries=2, tile_keys=2)
    assert kept == [False, False]
    torch.testing.assert_close(together, torch.softmax(torch.tensor(scores).double(), -1), rtol=0, atol=1e-12)
    assert run(scores[:1], 0.5, tile_queries=2, tile_keys=2)[1] == [
        False,
        True,
    ]  # the missing row votes for it
    alone = skip_softmax_attention(
        *scored(scores), threshold=0.5, softmax_scale=1.0, tile_queries=1, tile_keys=2
    )[1]
    assert alone[0, 0].tolist() == [[False, True], [False, False]]


def test_the_first_tile_is_the_first_visited() -> None:
    scores = [[0.0, 0.0, 9.0, 9.0]]
    call = scored(scores)
    tiles = {"tile_queries": 1, "tile_keys": 2, "softmax_scale": 1.0, "threshold": 0.5}
    assert skip_softmax_attention(*call, **tiles)[1].flatten().tolist() == [False, False]
    assert skip_softmax_attention(*call, tile_order=(1, 0), **tiles)[1].flatten().tolist() == [True, False]


def test_a_row_without_a_key_is_zeros() -> None:
    query, key, value = random_call(5, 3)
    output, _ = skip_softmax_attention(query, key, value, threshold=0.5, causal=True, **TILES)
    assert not output[:, :2].any() and bool(output.isfinite().all())
    assert not skip_softmax_attention(query, key[:, :0], value[:, :0], threshold=0.5, **TILES)[0].any()
