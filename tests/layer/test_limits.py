"""What facts do not claim is refused while a layer is built, by name; what they claim is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from omni_attn import Attention, use_attention_config
from omni_attn.facts import DeviceInfo, KernelFacts
from omni_attn.facts.device import FAMILIES_WITH_CAPABILITY
from omni_attn.platforms import current_omni_platform
from omni_attn.platforms.assumed import ASSUMED_NAMES
from omni_attn.testing import fake_device
from tests.layer.limited import LIMITED
from tests.layer.stands import CUDNN, HEAD_SIZE, STANDS, Stand, every_stand, refusal_of

#: Needs of a layer, whether facts claim them, and a word of the refusal, or the words it may choose from ("a|b").
NEEDS: dict[str, tuple[dict[str, Any], Callable[[KernelFacts], bool], str]] = {
    "backward": ({"requires_grad": True}, lambda facts: facts.backward, "backward"),
    "compiled backward": (
        {"requires_grad": True, "compile": True},
        lambda facts: facts.backward and facts.compiled_backward and facts.compile_mode != "eager_only",
        "backward",
    ),
    "compile": ({"compile": True}, lambda facts: facts.compile_mode != "eager_only", "torch.compile"),
    "batch invariance": ({"batch_invariant": True}, lambda facts: facts.batch_invariant, "batch invariance"),
    "causal": ({"causal": True}, lambda facts: facts.causal, "causal"),
    "causal, unequal lengths": (
        {"causal": True, "max_seqlen_q": 256, "max_seqlen_k": 512},
        lambda facts: facts.causal and facts.causal_unequal_lengths and facts.unequal_lengths,
        "causal",
    ),
    "unequal lengths": (
        {"max_seqlen_q": 256, "max_seqlen_k": 512},
        lambda facts: facts.unequal_lengths,
        "256 and 512",
    ),
    "short queries": (
        {"max_seqlen_q": 1},
        lambda facts: facts.min_query_tokens == 1,
        "query tokens, found 1",
    ),
    "short keys": (
        {"max_seqlen_k": 1},
        lambda facts: facts.min_key_tokens == facts.key_tile == 1,
        "key tokens, found 1",
    ),
    "ragged keys": (
        {"max_seqlen_q": 1001, "max_seqlen_k": 1001},
        lambda facts: facts.key_tile == 1,
        "key tokens, found 1001",
    ),
    "ragged keys behind many": (
        {"max_seqlen_q": 32763, "max_seqlen_k": 32763},
        lambda facts: facts.key_tile == 1 or facts.min_ragged_keys <= 32763,
        "key tokens, found 32763",
    ),
    "window": ({"window": (2, 1)}, lambda facts: facts.window and facts.right_windows, "window"),
    "left window": ({"window": (2, -1)}, lambda facts: facts.window, "window"),
    "grouped heads": ({"num_kv_heads": 2}, lambda facts: facts.gqa, "num_kv_heads"),
    "value heads": ({"value_head_size": 64}, lambda facts: facts.value_head_size, "value_head_size"),
    "scale": ({"softmax_scale": 0.3}, lambda facts: facts.custom_scale, "softmax_scale"),
    "packing": ({"packed": True}, lambda facts: facts.packing, "cu_seqlens"),
    "padding": ({"mask_usage": "padding"}, lambda facts: "padding" in facts.mask_kinds, "attn_mask"),
    "arbitrary masks": (
        {"mask_usage": "arbitrary"},
        lambda facts: "arbitrary" in facts.mask_kinds,
        "attn_mask",
    ),
    "causal with a mask": (
        {"causal": True, "mask_usage": "padding"},
        lambda facts: facts.causal_with_mask and facts.causal and "padding" in facts.mask_kinds,
        "attn_mask|causal",
    ),
    "cross-attention": (
        {"role": "cross", "video_grid": False},
        lambda facts: not (facts.self_attention_only or facts.needs_video_grid),
        "self-attention|video grid",
    ),
    "no video grid": ({"video_grid": False}, lambda facts: not facts.needs_video_grid, "video grid"),
    "float64": ({"dtype": "float64"}, lambda facts: "float64" in facts.dtypes, "float64"),
}


@every_stand
@pytest.mark.parametrize("need", NEEDS)
def test_a_need_is_claimed_or_refused(stand: Stand, need: str) -> None:
    needs, claimed, words = NEEDS[need]
    with stand.kernels():
        if claimed(stand.facts):
            layer = stand.layer(4, HEAD_SIZE, **needs)
            assert layer.selection is not None and layer.selection.backend == stand.name
            return
        text = refusal_of(lambda: stand.layer(4, HEAD_SIZE, **needs))
    assert stand.name in text and any(word in text for word in words.split("|"))


def test_each_need_is_refused_by_one_backend_and_served_by_another() -> None:
    """So that neither half of the recipes runs on nothing; nobody is batch invariant, and many keys hide a few."""
    for need, (_, claimed, _) in NEEDS.items():
        answers = {claimed(stand.facts) for stand in STANDS}
        assert answers == {True, False} or need in ("batch invariance", "ragged keys behind many")


def _fits(facts: KernelFacts, device: DeviceInfo) -> bool:
    """Whether a kernel runs there; a family without capabilities is not held against a range of them."""
    capable = device.capability is not None and any(device.capability in r for r in facts.capabilities)
    without = bool(facts.device_kinds) and device.kind not in FAMILIES_WITH_CAPABILITY
    return (
        (not facts.device_kinds or device.kind in facts.device_kinds)
        and (not facts.capabilities or capable or without)
        and (not facts.architectures or device.name in facts.architectures)
    )


@every_stand
@pytest.mark.parametrize("name", ASSUMED_NAMES)
def test_another_machine_is_refused_by_name(stand: Stand, name: str) -> None:
    packages = {package.distribution: package.minimum or "1.0" for package in stand.facts.packages}
    device = fake_device(name, packages=packages, cudnn=CUDNN)
    with stand.kernels(), use_attention_config(stand.config, platform=current_omni_platform(device)):
        if _fits(stand.facts, device):
            assert Attention(4, HEAD_SIZE, role="self", video_grid=True).impl is not None
            return
        text = refusal_of(lambda: Attention(4, HEAD_SIZE, role="self", video_grid=True))
    assert stand.name in text and name in text


def test_the_limited_backends_are_among_the_recipes() -> None:
    assert set(LIMITED) < {stand.name for stand in STANDS}
