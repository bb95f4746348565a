"""length_reasons: lengths against a kernel's limits, at selection and at build."""

from __future__ import annotations

from typing import Any

import pytest

from omni_attn.facts import AttentionRequest, CapabilityRange, DeviceInfo, KernelFacts, evaluate
from omni_attn.facts.lengths import length_reasons

TILED = KernelFacts(causal=True, causal_unequal_lengths=False, key_tile=64, min_ragged_keys=4096)
LONG = KernelFacts(min_query_tokens=128, min_key_tokens=64)
NOWHERE = DeviceInfo(kind="any", name="any")


def reasons(facts: KernelFacts, queries: int | None, keys: int | None, **how: bool) -> str:
    return "; ".join(length_reasons(facts, queries, keys, **how))


@pytest.mark.parametrize("keys", [64, 128, 4096, 4097, 32760, None, 0])
def test_whole_tiles_and_many_keys_are_taken(keys: int | None) -> None:
    assert reasons(TILED, 5, keys) == ""


@pytest.mark.parametrize("keys", [1, 63, 65, 4095])
def test_a_few_ragged_keys_are_refused_with_every_number(keys: int) -> None:
    assert (
        reasons(TILED, 5, keys)
        == f"needs a multiple of 64 key tokens, or at least 4096 key tokens, found {keys}"
    )


def test_the_causal_mask_covers_the_rest_of_a_tile() -> None:
    assert reasons(TILED, 65, 65, causal=True) == ""
    assert "causal attention, found 64 and 128" in reasons(TILED, 64, 128, causal=True)


def test_the_longest_of_many_says_nothing_about_tiles() -> None:
    assert reasons(TILED, 65, 65, longest_of_many=True) == ""
    assert "at least 64 key tokens, found 63" in reasons(LONG, 128, 63, longest_of_many=True)


def test_both_sides_are_told() -> None:
    said = reasons(LONG, 127, 63)
    assert "at least 128 query tokens, found 127" in said and "at least 64 key tokens, found 63" in said


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend_to_needs_no_kernel(lengths: tuple[int, int]) -> None:
    equal_only = KernelFacts(unequal_lengths=False, min_query_tokens=128, min_key_tokens=128)
    assert reasons(equal_only, *lengths) == ""


@pytest.mark.parametrize(
    ("needs", "refused"),
    [
        ({"max_seqlen_k": 77}, True),
        ({"max_seqlen_k": 77, "packed": True}, False),
        ({"max_seqlen_q": 77, "max_seqlen_k": 77, "causal": True}, False),
        ({}, False),
    ],
    ids=str,
)
def test_the_evaluator_asks_the_same_question(needs: dict[str, Any], refused: bool) -> None:
    facts = KernelFacts(causal=True, packing=True, key_tile=64, min_ragged_keys=4096)
    request = AttentionRequest(role="self", num_heads=4, head_size=64, **needs)
    assert any("multiple of 64" in reason for reason in evaluate(facts, request, NOWHERE)) == refused


def test_a_range_of_one_capability_is_called_by_its_number() -> None:
    assert str(CapabilityRange(minimum=(8, 6), below=(8, 7))) == "8.6"
    assert str(CapabilityRange(minimum=(8, 0), below=(10, 0))) == "8.0 to below 10.0"
    assert str(CapabilityRange(minimum=(8, 0))) == "8.0 or newer"
