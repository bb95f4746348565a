"""default_reasons: a kernel that nobody chose takes all that a request leaves open; one that was chosen need not."""

from __future__ import annotations

from typing import Any

import pytest

from omni_attn.facts import AttentionRequest, BackendFacts, DeviceInfo, KernelFacts, Variant, choose_variant
from omni_attn.facts.evaluate import default_reasons

NOWHERE = DeviceInfo(kind="any", name="any")
HINTS = {"max_seqlen_q": 64, "max_seqlen_k": 64}
MASKS = frozenset({"padding", "arbitrary"})

#: Limits, a request that leaves open what they refuse, words of the reason, and what leaves nothing open.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], list[dict[str, Any]]]] = {
    "boundaries on the device": (
        {"packing": True, "device_boundaries": False},
        {"packed": True},
        ["packed sequences bounded on the device", "host boundaries only"],
        [{"packed": False}],
    ),
    "float masks": (
        {"mask_kinds": MASKS, "float_masks": False},
        {"mask_usage": "arbitrary"},
        ["float masks and masks by head", "some masks only"],
        [{"mask_usage": "padding"}, {"mask_usage": "never"}],
    ),
    "masks by head": (
        {"mask_kinds": MASKS, "head_masks": False},
        {"mask_usage": "arbitrary"},
        ["float masks and masks by head", "some masks only"],
        [{"mask_usage": "padding"}, {"mask_usage": "never"}],
    ),
    "unequal lengths": (
        {"unequal_lengths": False},
        {},
        ["unequal query and key lengths", "without length hints", "equal ones only"],
        [HINTS],
    ),
    "unequal lengths, one hint": (
        {"unequal_lengths": False},
        {"max_seqlen_q": 64},
        ["unequal query and key lengths", "without length hints"],
        [{"max_seqlen_k": 64}],
    ),
    "unequal lengths of packed sequences, whatever the longest": (
        {"packing": True, "unequal_lengths": False},
        {"packed": True, **HINTS},
        ["unequal query and key lengths", "on packed sequences", "equal ones only"],
        [{"packed": False}],
    ),
    "causal unequal lengths of packed sequences": (
        {"packing": True, "causal": True, "causal_unequal_lengths": False},
        {"packed": True, "causal": True, **HINTS},
        ["causal attention of unequal lengths", "on packed sequences"],
        [{"packed": False}, {"causal": False}],
    ),
    "causal unequal lengths": (
        {"causal": True, "causal_unequal_lengths": False},
        {"causal": True},
        ["causal attention of unequal lengths", "without length hints", "equal ones only"],
        [HINTS, {"causal": False}],
    ),
    "causal unequal lengths, hints on packed sequences": (
        {"causal": True, "causal_unequal_lengths": False, "packing": True},
        {"causal": True, "packed": True, **HINTS},
        ["causal attention of unequal lengths"],
        [{"packed": False}],
    ),
    "causal unequal lengths, one hint": (
        {"causal": True, "causal_unequal_lengths": False},
        {"causal": True, "max_seqlen_k": 64},
        ["causal attention of unequal lengths", "without length hints"],
        [{"max_seqlen_q": 64}],
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
Case = tuple[dict[str, Any], dict[str, Any], list[str], list[dict[str, Any]]]


def request(**needs: Any) -> AttentionRequest:
    return AttentionRequest(role="self", num_heads=4, head_size=64, **needs)


def unlimited(limits: dict[str, Any]) -> KernelFacts:
    """The same kernel with True for each False."""
    return KernelFacts(**{name: value or True for name, value in limits.items()})


@every_case
def test_what_is_left_open_refuses_a_default(case: Case) -> None:
    limits, leaves_open, words, _ = case
    [reason] = default_reasons(KernelFacts(**limits), request(**leaves_open))
    assert reason.startswith("needs ") and ", found " in reason and "default" in reason
    assert all(word in reason for word in words), reason


@every_case
def test_and_it_is_the_reason_that_the_choice_of_a_default_gives(case: Case) -> None:
    limits, leaves_open, *_ = case
    asked = request(**leaves_open)
    chosen, reasons = choose_variant(BackendFacts(**limits), asked, NOWHERE, by_default=True)
    assert chosen is None and reasons == tuple(default_reasons(KernelFacts(**limits), asked))


@every_case
def test_an_explicit_choice_is_accepted(case: Case) -> None:
    """It is refused only when such a step comes."""
    limits, leaves_open, *_ = case
    assert choose_variant(BackendFacts(**limits), request(**leaves_open), NOWHERE) == (None, ())
    variants = BackendFacts(variants=(Variant(name="one", facts=KernelFacts(**limits)),))
    for pinned in (None, "one"):
        assert choose_variant(variants, request(**leaves_open), NOWHERE, pinned) == ("one", ())


@every_case
def test_a_request_that_leaves_nothing_open_has_its_default(case: Case) -> None:
    limits, leaves_open, _, closes = case
    for needs in closes:
        asked = request(**leaves_open | needs)
        assert choose_variant(BackendFacts(**limits), asked, NOWHERE, by_default=True) == (None, ())


@every_case
def test_a_kernel_without_the_limit_is_a_default(case: Case) -> None:
    limits, leaves_open, *_ = case
    assert not list(default_reasons(unlimited(limits), request(**leaves_open)))


@every_case
def test_the_next_variant_is_the_default_and_the_first_the_explicit_choice(case: Case) -> None:
    limits, leaves_open, *_ = case
    facts = BackendFacts(
        variants=(
            Variant(name="limited", facts=KernelFacts(**limits)),
            Variant(name="able", facts=unlimited(limits)),
        )
    )
    asked = request(**leaves_open)
    assert choose_variant(facts, asked, NOWHERE, by_default=True) == ("able", ())
    assert choose_variant(facts, asked, NOWHERE) == ("limited", ())


def test_reasons_name_the_variants_that_they_hold_for() -> None:
    facts = BackendFacts(
        variants=(
            Variant(name="equal", facts=KernelFacts(packing=True, unequal_lengths=False)),
            Variant(name="hosted", facts=KernelFacts(packing=True, device_boundaries=False)),
        )
    )
    chosen, reasons = choose_variant(facts, request(packed=True), NOWHERE, by_default=True)
    assert chosen is None and sorted(reason.split(":")[0] for reason in reasons) == ["equal", "hosted"]


def test_what_is_refused_anyway_is_told_once() -> None:
    """Without masks, packing or causal attention the evaluator's own reason says enough."""
    nothing = KernelFacts(float_masks=False, head_masks=False, causal_unequal_lengths=False)
    asked = request(mask_usage="arbitrary", causal=True)
    assert not list(default_reasons(nothing, asked))
    _, reasons = choose_variant(BackendFacts(float_masks=False), asked, NOWHERE, by_default=True)
    assert len(reasons) == 2 and {"attn_mask" in r or "causal attention" in r for r in reasons} == {True}


def test_one_reason_for_lengths_is_enough() -> None:
    """Where no unequal lengths are served at all, causal ones need no reason of their own."""
    equal = KernelFacts(causal=True, unequal_lengths=False, causal_unequal_lengths=False)
    assert len(list(default_reasons(equal, request(causal=True)))) == 1
