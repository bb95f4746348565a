"""Boundaries that only the device knows: no look at them from the host, and the same numbers as one by one.

On a GPU this is the ordinary case. Here the one function that reads boundaries on the host is switched off.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from omni_attn import AttentionMetadata
from omni_attn.backends import stated
from omni_attn.ops.reference import reference_attention
from omni_attn.products import build_product
from tests.layer.stands import HEAD_SIZE, Stand, assert_close, every_stand, outcome_of, refusal_of, tensors

NAN = float("nan")


@pytest.fixture(autouse=True)
def _boundaries_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stated, "_on_host", lambda boundaries: None)


def packed(cu_q: tuple[int, ...], cu_k: tuple[int, ...] | None = None, **fields: int) -> AttentionMetadata:
    as_tensor = [None if cu is None else torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k)]
    return AttentionMetadata(cu_seqlens_q=as_tensor[0], cu_seqlens_k=as_tensor[1], **fields)


@every_stand
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        ((0, 5, 9), (0, 5, 9)),
        ((0, 12), (0, 12)),
        ((0, 2, 9), (0, 7, 10)),  # unequal lengths in each sequence
        ((0, 4, 4, 9), (0, 3, 6, 8)),  # no queries in the second
        ((0, 4, 7, 9), (0, 5, 5, 8)),  # no keys in the second: zeros
        ((0, 1, 2, 12), (0, 1, 2, 11)),  # single tokens
    ],
)
def test_sequences_are_isolated(
    stand: Stand, cu_q: tuple[int, ...], cu_k: tuple[int, ...], causal: bool
) -> None:
    query, key, value = tensors(1, 12, 12, kv_heads=2)
    expected = torch.zeros(1, 12, 4, HEAD_SIZE, dtype=torch.float64)
    for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        part = reference_attention(query[:, a:b], key[:, c:d], value[:, c:d], causal=causal)[0]
        expected[:, a:b] = part
    query[:, cu_q[-1] :], key[:, cu_k[-1] :], value[:, cu_k[-1] :] = NAN, NAN, NAN
    with stand.kernels():
        for output in stand.both(query, key, value, packed(cu_q, cu_k), causal=causal):
            assert_close(output, expected)
            assert output.is_contiguous() and not output[:, cu_q[-1] :].any()


@every_stand
def test_key_boundaries_default_to_the_querys(stand: Stand) -> None:
    """A kernel for equal lengths alone can take that, and not a second tensor, whose numbers nobody looks at."""
    query, key, value = tensors(1, 9, 9)
    expected = torch.cat(
        [
            reference_attention(*(x[:, rows] for x in (query, key, value)))[0]
            for rows in (slice(4), slice(4, 9))
        ],
        dim=1,
    )
    with stand.kernels():
        outputs, same = (stand.both(query, key, value, packed((0, 4, 9), cu_k)) for cu_k in (None, (0, 4, 9)))
    for output in outputs:
        assert_close(output, expected)
    if stand.facts.unequal_lengths:
        assert all(torch.equal(*pair) for pair in zip(outputs, same, strict=True))
    else:
        assert not same


@every_stand
def test_longest_sequences_may_be_stated(stand: Stand) -> None:
    query, key, value = tensors(1, 9, 9)
    with stand.kernels():
        expected = stand.both(query, key, value, packed((0, 4, 9)))
        outputs = stand.both(query, key, value, packed((0, 4, 9), max_seqlen_q=5, max_seqlen_k=5))
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))


@every_stand
@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 4, 9])}, ["cu_seqlens_q", "int64", "int32"]),
        ({"cu_seqlens_q": torch.zeros(2, 2, dtype=torch.int32)}, ["cu_seqlens_q", "(2, 2)"]),
        (
            {"cu_seqlens_q": torch.tensor([0, 9]).int(), "cu_seqlens_k": torch.tensor([0, 4, 9]).int()},
            ["cu_seqlens_q", "cu_seqlens_k", "1", "2"],
        ),
        (
            {
                "cu_seqlens_q": torch.tensor([0, 9]).int(),
                "attn_mask": torch.tensor([[True] * 5 + [False] * 4]),
            },
            ["attn_mask", "cu_seqlens"],
        ),
    ],
    ids=["int64", "2-D", "counts", "mask"],
)
def test_what_cannot_be_read_is_refused(stand: Stand, fields: dict, parts: list[str]) -> None:
    call, record = tensors(1, 9, 9), AttentionMetadata(**fields)
    with stand.kernels():
        text = refusal_of(lambda: stand.run_layer(*call, record))
    assert stand.name in text
    if stand.facts.packing:
        assert all(part in text for part in parts), text
    else:
        assert stand.limits(*call, record).told_by(text)


@every_stand
def test_nothing_waits_for_the_device(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing looks at no value of a boundary or mask tensor: item(), tolist() and bool() would synchronise."""

    def synchronises(self: torch.Tensor, *_: object) -> object:
        raise AssertionError("a device tensor was read on the host")

    record = packed((0, 4, 9), (0, 5, 9))
    limits = stand.limits(*tensors(1, 9, 9), record)
    with stand.kernels():
        _, builder = stand.impl(4, HEAD_SIZE)
        for method in ("item", "tolist", "__bool__", "__int__", "__index__", "cpu", "numpy", "nonzero"):
            monkeypatch.setattr(torch.Tensor, method, synchronises)
        outcome = outcome_of(lambda: build_product(builder, record, (9, 9)))
    monkeypatch.undo()
    assert limits.told_by(outcome) if isinstance(outcome, str) else outcome is not None
