"""Names, aliases, the owner table, and suggestions."""

from __future__ import annotations

import pytest

from omni_attn.config import AttentionSpec
from omni_attn.config.names import (
    ALIASES,
    KNOWN_NAMES,
    OPTION_OWNERS,
    canonical_name,
    foreign_option,
    nearest,
)
from omni_attn.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("flash_attn", "FLASH_ATTN"),
        ("Sdpa", "TORCH_SDPA"),
        ("vsa", "FASTVIDEO_VSA"),
        ("FlashInfer", "FLASHINFER_ATTN"),
        ("trtllm", "TRTLLM_ATTN"),
        ("cudnn", "CUDNN_ATTN"),
        ("sage", "SAGE_ATTN"),
        ("my_Plugin", "MY_PLUGIN"),
    ],
)
def test_canonical_name(text: str, name: str) -> None:
    assert canonical_name(text) == name
    assert canonical_name(name) == name


@pytest.mark.parametrize("text", ["", " ", "FLASH ATTN", " SDPA", "SDPA\n", None, 3, True, ["SDPA"]])
def test_what_is_not_one_word_is_no_name(text: object) -> None:
    with pytest.raises(ConfigError, match="backend"):
        canonical_name(text)


def test_the_table_is_closed() -> None:
    assert set(ALIASES.values()) <= set(KNOWN_NAMES)
    assert not set(ALIASES) & set(KNOWN_NAMES)
    assert {owner for owners in OPTION_OWNERS.values() for owner in owners} <= set(KNOWN_NAMES)
    assert set(OPTION_OWNERS) <= set(AttentionSpec.model_fields)


def test_every_block_of_a_spec_has_owners() -> None:
    shared = {"backend", "variant", "fallback", "options"}
    assert set(AttentionSpec.model_fields) - shared == set(OPTION_OWNERS)


@pytest.mark.parametrize(
    ("word", "choices", "expected"),
    [
        ("backnd", ["backend", "variant"], "backend"),
        ("flash_atn", KNOWN_NAMES, "FLASH_ATTN"),
        ("TORCH_SPDA", KNOWN_NAMES, "TORCH_SDPA"),
        ("zzz", KNOWN_NAMES, None),
    ],
)
def test_nearest(word: str, choices: list[str], expected: str | None) -> None:
    assert nearest(word, choices) == expected


def test_foreign_option_names_owner_and_backend() -> None:
    assert foreign_option("skip_softmax", "TRTLLM_ATTN") is None
    assert foreign_option("skip_softmax", "TORCH_SDPA") == (
        "skip_softmax is only supported by the TRTLLM_ATTN backend, not by TORCH_SDPA"
    )
    assert foreign_option("quant", "PLUGIN") == (
        "quant is only supported by the TRTLLM_ATTN and FLASHINFER_ATTN backends, not by PLUGIN"
    )
    assert foreign_option("options", "PLUGIN") is None
    assert "has no options" in str(foreign_option("options", "TORCH_SDPA"))
    assert "quant, skip_softmax" in str(foreign_option("options", "TRTLLM_ATTN"))
