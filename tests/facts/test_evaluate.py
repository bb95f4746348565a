"""evaluate: facts against a request on a device, with variants, unknowns and reasons that name both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omni_attn.backends.flash_attn import FlashAttentionBackend
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.errors import BackendRejectedError
from omni_attn.facts import (
    AttentionRequest,
    BackendFacts,
    CapabilityHeadSizes,
    CapabilityRange,
    HeadSizes,
    KernelFacts,
    Variant,
    choose_variant,
    evaluate,
)
from omni_attn.selector import select
from omni_attn.testing import fake_device
from tests.selection.stubs import ask, choose

FLASH = FlashAttentionBackend.facts
FA4, FA3, FA2 = {"flash-attn-4": "4.0.0b36"}, {"fa3-fwd": "0.0.3"}, {"flash-attn": "2.8.3"}
CPU = fake_device("cpu")


def request(**needs: Any) -> AttentionRequest:
    return AttentionRequest(**{"role": "self", "num_heads": 4, "head_size": 64} | needs)


# --- variants


@pytest.mark.parametrize(
    ("device", "packages"), [("sm_90", FA3), ("sm_90", FA2), ("sm_90", FA2 | FA3), ("sm_80", FA2)], ids=str
)
def test_one_variant_that_serves_is_enough(device: str, packages: dict[str, str]) -> None:
    assert evaluate(FLASH, ask(), fake_device(device, packages=packages)) == ()


@pytest.mark.parametrize(
    ("device", "packages", "parts"),
    [
        ("sm_90", {}, ["fa3: needs flash-attn-3 or", "fa2: needs flash-attn >= 2.6", "found none"]),
        ("sm_90", {"flash-attn": "2.5.9"}, ["fa2: needs flash-attn >= 2.6", "found 2.5.9", "fa3: needs"]),
        ("sm_80", FA3, ["fa3: needs compute capability", "fa2: needs flash-attn"]),
        ("cpu", {}, ["needs a cuda device, found cpu"]),
    ],
    ids=str,
)
def test_reasons_name_the_variant_they_hold_for(
    device: str, packages: dict[str, str], parts: list[str]
) -> None:
    reasons = evaluate(FLASH, ask(), fake_device(device, packages=packages))
    for part in parts:
        assert any(part in reason for reason in reasons), reasons
    assert all("needs" in reason and "found" in reason for reason in reasons)


def test_a_reason_of_all_variants_is_told_once() -> None:
    machine = fake_device("sm_90", packages=FA2 | FA3 | FA4)
    reasons = evaluate(FLASH, ask(dtype="float32"), machine)
    assert reasons == ("needs dtype bfloat16 or float16, found float32",)


def test_limits_of_two_variants_do_not_add_up() -> None:
    """fa3-fwd has no windows; fa2, which has, serves the request, whatever the other lacks."""
    windowed = ask(window=(8, 8), causal=True)
    assert evaluate(FLASH, windowed, fake_device("sm_90", packages=FA2 | FA3)) == ()
    assert evaluate(FLASH, windowed, fake_device("sm_90", packages=FA3))
    facts = BackendFacts(
        causal=True,
        gqa=True,
        variants=(
            Variant(name="one", facts=KernelFacts(causal=True)),
            Variant(name="two", facts=KernelFacts(gqa=True)),
        ),
    )
    reasons = evaluate(facts, request(causal=True, num_kv_heads=2), CPU)
    assert len(reasons) == 2 and reasons[0].startswith("one: needs num_kv_heads = num_heads")
    assert reasons[1].startswith("two: needs causal attention")


# --- hardware and packages


@pytest.mark.parametrize("device", ["sm_100", "sm_75"])
@pytest.mark.parametrize(
    ("packages", "found"),
    [
        ({}, []),
        (FA2, ["flash-attn 2.8.3"]),
        (FA3, ["fa3-fwd 0.0.3"]),
        (FA2 | FA3, ["flash-attn 2.8.3", "fa3-fwd 0.0.3"]),
    ],
    ids=["none", "fa2", "fa3", "both"],
)
def test_a_flash_choice_names_capability_and_package(
    device: str, packages: dict[str, str], found: list[str]
) -> None:
    machine = fake_device(device, packages=packages, cudnn=91900)
    with pytest.raises(BackendRejectedError) as caught:
        select(ask(), choose("FLASH_ATTN"), machine)
    for part in [device, f"found {machine.capability}", *found]:
        assert part in str(caught.value)


def test_nobody_is_sent_to_install_what_cannot_run() -> None:
    """Version 4 is the one for this capability; of the others the hardware says all there is to say."""
    blackwell, turing = (evaluate(FLASH, ask(), fake_device(name)) for name in ("sm_100", "sm_75"))
    assert any("flash-attn-4" in reason and "found none installed" in reason for reason in blackwell)
    assert not any("fa3-fwd" in reason or "flash-attn >=" in reason for reason in blackwell)
    assert turing and not any("pip" in reason for reason in turing)


@pytest.mark.parametrize("device", ["cpu", "mps", "gfx942", "npu"])
def test_no_package_is_asked_for_on_another_kind_of_device(device: str) -> None:
    [reason] = evaluate(FLASH, ask(), fake_device(device))
    assert reason.startswith("needs a cuda device, found") and "pip" not in reason


# --- what is unknown is no reason

NARROW = replace(
    TorchSDPABackend.facts,
    gqa=False,
    value_head_size=False,
    custom_scale=False,
    unequal_lengths=False,
    min_key_tokens=64,
    dtypes=frozenset({"bfloat16"}),
    head_sizes=HeadSizes(allowed=(64,)),
    mask_kinds=frozenset(),
)
NOTHING_KNOWN: dict[str, Any] = {"num_heads": None, "head_size": -1}


@pytest.mark.parametrize(
    ("known", "needs"),
    [
        ({"num_heads": None}, {"num_kv_heads": 2}),
        ({"head_size": -1}, {"value_head_size": 8}),
        ({"head_size": -1}, {"softmax_scale": 0.5}),
        ({"head_size": -1}, {"softmax_scale": 0.125}),
        ({}, {"dtype": None}),
        ({}, {"mask_usage": None}),
        ({}, {"max_seqlen_q": 8}),
        ({}, {"max_seqlen_k": 64}),
        (NOTHING_KNOWN, {}),
        (NOTHING_KNOWN, {"num_kv_heads": 2, "value_head_size": 8, "softmax_scale": 0.5}),
    ],
    ids=str,
)
def test_unknown_facts_give_no_reason(known: dict[str, Any], needs: dict[str, Any]) -> None:
    assert evaluate(NARROW, request(**known, **needs), CPU) == ()


@pytest.mark.parametrize(
    ("needs", "parts"),
    [
        ({"num_kv_heads": 2}, ["num_kv_heads", "2", "4"]),
        ({"value_head_size": 8}, ["value_head_size", "8", "64"]),
        ({"softmax_scale": 0.5}, ["softmax_scale", "0.5"]),
        ({"head_size": 80}, ["head_size=80", "64"]),
        ({"dtype": "float32"}, ["bfloat16", "float32"]),
        ({"mask_usage": "padding"}, ["attn_mask", "padding"]),
        ({"max_seqlen_q": 8, "max_seqlen_k": 64}, ["8", "64"]),
        ({"max_seqlen_k": 63}, ["64", "63"]),
    ],
    ids=str,
)
def test_the_same_facts_refuse_what_is_known(needs: dict[str, Any], parts: list[str]) -> None:
    [reason] = evaluate(NARROW, request(**needs), CPU)
    assert all(part in reason for part in ["needs", "found", *parts])


def test_a_scale_that_says_the_default_is_the_default() -> None:
    assert evaluate(NARROW, request(softmax_scale=64**-0.5), CPU) == ()


# --- limits that depend on the capability


def test_head_sizes_may_differ_by_capability() -> None:
    facts = KernelFacts(
        head_sizes=HeadSizes(multiple_of=8, minimum=16, maximum=256),
        value_head_size=True,
        capability_head_sizes=(
            CapabilityHeadSizes(
                capabilities=CapabilityRange(minimum=(10, 0), below=(12, 0)),
                head_sizes=HeadSizes(multiple_of=8, maximum=128, beside=(256,)),
            ),
        ),
    )
    hopper, blackwell, last = (fake_device(name) for name in ("sm_90", "sm_100", "sm_120"))
    for size, accepted in ((192, (hopper, last)), (256, (hopper, blackwell, last)), (8, (blackwell,))):
        for device in (hopper, blackwell, last):
            reasons = evaluate(facts, request(head_size=size), device)
            assert (reasons == ()) == (device in accepted), (size, device.name)
            assert reasons == () or f"head_size={size}" in reasons[0]
    [reason] = evaluate(facts, request(head_size=192), blackwell)
    assert reason == "needs head_size a multiple of 8 up to 128, or 256 on sm_100, found head_size=192"
    [reason] = evaluate(facts, request(head_size=128, value_head_size=8), hopper)
    assert reason == "needs value_head_size a multiple of 8 from 16 up to 256, found value_head_size=8"


def test_a_capability_is_asked_of_families_that_have_one() -> None:
    facts = KernelFacts(
        device_kinds=frozenset({"cuda", "rocm"}), capabilities=(CapabilityRange(minimum=(8, 0)),)
    )
    assert evaluate(facts, request(), fake_device("gfx942")) == ()
    assert evaluate(facts, request(), fake_device("sm_80")) == ()
    assert "8.0 or newer" in evaluate(facts, request(), fake_device("sm_75"))[0]
    assert "needs a cuda or rocm device" in evaluate(facts, request(), CPU)[0]


def test_a_variant_for_explicit_choices_is_no_default() -> None:
    by_name = Variant(name="one", facts=KernelFacts(), explicit_only=True)
    facts = BackendFacts(variants=(by_name,))
    assert choose_variant(facts, request(), CPU) == ("one", ())
    assert choose_variant(facts, request(), CPU, "one") == ("one", ())
    chosen, [reason] = choose_variant(facts, request(), CPU, by_default=True)
    assert chosen is None and "needs to be chosen by name, found a platform default" in reason
    both = BackendFacts(variants=(by_name, Variant(name="two", facts=KernelFacts())))
    assert choose_variant(both, request(), CPU)[0] == "one"
    assert choose_variant(both, request(), CPU, by_default=True)[0] == "two"


def test_a_window_together_with_a_mask() -> None:
    """FlashAttention packs the kept keys, which moves their positions."""
    facts = KernelFacts(mask_kinds=frozenset({"padding"}), window=True)
    [reason] = evaluate(facts, request(window=(4, 4), mask_usage="padding"), CPU)
    assert reason == "needs a window together with attn_mask, found support for one of them at a time"
    assert evaluate(facts, request(window=(4, 4), mask_usage="never"), CPU) == ()
    assert evaluate(facts, request(mask_usage="padding"), CPU) == ()
