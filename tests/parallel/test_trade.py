"""The exchanges of a Ulysses group move numbers as they are, one by one or several in a word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omni_attn.parallel import Parallel, Shards
from omni_attn.parallel.copies import _is_made_of_words, copy_numbers
from omni_attn.parallel.heads import split_heads
from omni_attn.parallel.trade import HeadTrade, Traded
from omni_attn.testing import fake_ranks

LENGTH, HEADS = 7, 5


def contiguous(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, LENGTH, HEADS, size).to(dtype)


def fused(size: int, dtype: torch.dtype) -> Tensor:
    """One of three that a projection gave side by side."""
    side_by_side = torch.randn(2, LENGTH, 3 * HEADS * size).to(dtype)
    return side_by_side.split(HEADS * size, dim=2)[1].unflatten(2, (HEADS, size))


def shifted(size: int, dtype: torch.dtype) -> Tensor:
    """Rows that begin at an odd place, and lie an odd number of places apart."""
    return torch.randn(2, LENGTH, HEADS * size + 1).to(dtype)[:, :, 1:].unflatten(2, (HEADS, size))


def channels_first(size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(2, LENGTH, size, HEADS).to(dtype).transpose(2, 3)


every_layout = pytest.mark.parametrize(
    ("make", "size", "dtype", "in_words"),
    [
        (contiguous, 8, torch.bfloat16, True),
        (fused, 8, torch.float16, True),
        (contiguous, 6, torch.float32, True),
        (contiguous, 6, torch.bfloat16, False),
        (shifted, 8, torch.bfloat16, False),
        (channels_first, 8, torch.float32, False),
        (contiguous, 8, torch.float64, False),
        (contiguous, 8, torch.float8_e4m3fn, True),
    ],
)


@every_layout
def test_what_arrives_is_what_was_sent(
    make: Callable[[int, torch.dtype], Tensor], size: int, dtype: torch.dtype, in_words: bool
) -> None:
    torch.manual_seed(0)
    whole = [make(size, dtype) for _ in range(3)]
    assert _is_made_of_words(whole[0]) is in_words

    def work(parallel: Parallel) -> None:
        trade = HeadTrade(parallel.ulysses, split_heads(HEADS, HEADS, 2, role="self"))
        tokens = Traded(Shards.even(LENGTH, 2))
        own = [parallel.split(tensor) for tensor in whole]
        (query,), keys = trade.to_heads(own[:1], own[1:], tokens, tokens)
        first, end = trade.query_span
        for found, sent in zip((query, *keys), whole, strict=True):
            assert found.dtype == dtype
            assert torch.equal(found.float(), sent[:, :, first:end].float())
        assert torch.equal(trade.to_tokens(query, tokens).float(), own[0].float())

    fake_ranks({"ulysses_degree": 2}, work)


@pytest.mark.parametrize("target_recorded", [False, True])
def test_a_copy_with_a_gradient(target_recorded: bool) -> None:
    source = contiguous(8, torch.float32).requires_grad_()
    target = torch.zeros_like(source)
    if target_recorded:
        target = target * torch.ones((), requires_grad=True)
    copy_numbers(source, target)
    target.square().sum().backward()
    assert source.grad is not None
    torch.testing.assert_close(source.grad, 2 * source.detach())
