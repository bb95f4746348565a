"""REF against loops over single numbers: the definition, written down a second time."""

from __future__ import annotations

import math

import pytest
import torch

from omni_attn.ops.reference import reference_attention

B, H, G, SQ, SK, D, DV = 2, 4, 2, 3, 5, 8, 6


def tensors(queries: int = SQ, keys: int = SK) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (B, queries, H, D), (B, keys, G, D), (B, keys, G, DV)
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float = D**-0.5,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, number by number; `bias` [B, H, Sq, Sk] is added, -inf hides."""
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    lse = torch.full((query.shape[0], query.shape[2], query.shape[1]), -math.inf, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (*query.shape[:1], H, query.shape[1]))).tolist():
        group = h // (H // G)
        scores = []
        for j in range(key.shape[1]):
            dot = sum(x * y for x, y in zip(query[b, i, h].tolist(), key[b, j, group].tolist(), strict=True))
            scores.append(dot * scale + (0.0 if bias is None else bias[b, h, i, j].item()))
        weights = [math.exp(score) for score in scores]
        if sum(weights) > 0:
            lse[b, h, i] = math.log(sum(weights))
            for j, weight in enumerate(weights):
                output[b, i, h] += weight / sum(weights) * value[b, j, group].double()
    return output, lse


def check(answer: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for found, wanted in zip(answer, expected, strict=True):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def hidden(keep: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(B, H, keep.shape[-2], keep.shape[-1], dtype=torch.float64)
    return zeros.masked_fill(~keep, -math.inf)


def test_plain_with_grouped_heads_and_wide_values() -> None:
    check(reference_attention(*tensors()), by_hand(*tensors()))


def test_scale() -> None:
    check(reference_attention(*tensors(), softmax_scale=0.7), by_hand(*tensors(), scale=0.7))


def test_bool_masks_keep_and_float_masks_add() -> None:
    keep = torch.rand(B, 1, SQ, SK, generator=torch.Generator().manual_seed(0)) > 0.4
    keep[0, 0, 1] = False  # a row without a key
    check(reference_attention(*tensors(), attn_mask=keep), by_hand(*tensors(), bias=hidden(keep)))
    bias = torch.randn(1, H, SQ, SK, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check(
        reference_attention(*tensors(), attn_mask=bias), by_hand(*tensors(), bias=bias.expand(B, H, SQ, SK))
    )
    added = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    spread = added[:, None, None].expand(B, H, SQ, SK)
    check(reference_attention(*tensors(), attn_mask=added), by_hand(*tensors(), bias=spread))


def test_key_padding() -> None:
    keep = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    output, lse = reference_attention(*tensors(), attn_mask=keep)
    check((output, lse), by_hand(*tensors(), bias=hidden(keep[:, None, None].expand(B, 1, SQ, SK))))
    assert not output[1].any() and bool((lse[1] == -math.inf).all())


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 5), (5, 3), (1, 4)])
@pytest.mark.parametrize("window", [None, (1, -1), (-1, 0), (2, 1), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_causal_and_windows_look_from_the_end(
    queries: int, keys: int, causal: bool, window: tuple[int, int] | None
) -> None:
    left, right = (-1, -1) if window is None else window
    keep = torch.ones(queries, keys, dtype=torch.bool)
    for i in range(queries):
        for j in range(keys):
            distance = j - (i + keys - queries)  # the last query stands at the last key
            seen = (not causal or distance <= 0) and (left < 0 or distance >= -left)
            keep[i, j] = seen and (right < 0 or distance <= right)
    check(
        reference_attention(*tensors(queries, keys), causal=causal, window=window),
        by_hand(*tensors(queries, keys), bias=hidden(keep)),
    )


def test_no_keys_at_all() -> None:
    output, lse = reference_attention(*tensors(3, 0))
    assert output.shape == (B, 3, H, DV) and not output.any() and bool((lse == -math.inf).all())


def test_it_does_not_lose_precision() -> None:
    """Scores far apart, which float32 would round."""
    query, key, value = tensors()
    check(reference_attention(query * 9, key, value), by_hand(query * 9, key, value))
