"""`kv_cache` and `cudagraph_mode`: strict, described by the JSON Schema, and refused where there is no cache."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from omni_attn.config import KVCacheConfig, PipelineConfig, WanGenerationConfig
from omni_attn.config.families import FAMILIES
from omni_attn.config.kv_cache import CACHE_DTYPES, LAYOUTS
from omni_attn.config.loading import load_pipeline
from omni_attn.errors import ConfigError
from omni_attn.facts.kv_cache import CACHE_ITEM_BYTES, KV_LAYOUTS

BASE: dict[str, Any] = {"pipeline": "wan", "model": "wan-tiny"}
WITHOUT = [name for name, kind in FAMILIES.items() if not kind.keeps_kv_cache]


@pytest.fixture
def wan_keeps_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WanGenerationConfig, "keeps_kv_cache", True)


def test_names_are_those_of_the_facts() -> None:
    assert ("auto", *KV_LAYOUTS) == LAYOUTS
    assert set(CACHE_DTYPES) - {"auto"} <= set(CACHE_ITEM_BYTES)


def test_defaults_leave_everything_open() -> None:
    config = PipelineConfig.model_validate(BASE)
    assert config.kv_cache.model_dump() == {"layout": "auto", "dtype": "auto", "block_size": None}
    assert config.cudagraph_mode == "NONE"


@pytest.mark.usefixtures("wan_keeps_a_cache")
def test_what_a_family_with_a_cache_may_say() -> None:
    text = """
    pipeline: wan
    model: wan-tiny
    cudagraph_mode: FULL_AND_PIECEWISE
    kv_cache: {layout: HND, dtype: fp8_e4m3, block_size: 8}
    """
    config = load_pipeline(text, environ={})
    assert config.kv_cache == KVCacheConfig(layout="HND", dtype="fp8_e4m3", block_size=8)
    assert config.cudagraph_mode == "FULL_AND_PIECEWISE"
    again = PipelineConfig.model_validate(config.model_dump())
    assert again == config and hash(again) == hash(config)
    changed = load_pipeline(text, overrides=["kv_cache.block_size=16"], environ={})
    assert changed.kv_cache.block_size == 16


@pytest.mark.usefixtures("wan_keeps_a_cache")
@pytest.mark.parametrize(
    ("given", "where", "words"),
    [
        (
            {"kv_cache": {"layout": "NDH"}},
            "kv_cache.layout",
            "Unknown KV cache layout 'NDH'. Did you mean 'NHD'?",
        ),
        ({"kv_cache": {"layout": "LBNHC"}}, "kv_cache.layout", "Known: auto, NHD, HND"),
        ({"kv_cache": {"layout": None}}, "kv_cache.layout", "valid string"),
        ({"kv_cache": {"dtype": "fp8"}}, "kv_cache.dtype", "Known: auto, fp8_e4m3"),
        ({"kv_cache": {"dtype": "int8"}}, "kv_cache.dtype", "Unknown KV cache dtype 'int8'"),
        ({"kv_cache": {"block_size": 0}}, "kv_cache.block_size", "greater than or equal to 1"),
        ({"kv_cache": {"block_size": True}}, "kv_cache.block_size", "valid integer"),
        ({"kv_cache": {"block_size": "8"}}, "kv_cache.block_size", "valid integer"),
        ({"kv_cache": {"blocksize": 8}}, "kv_cache.blocksize", "Did you mean 'block_size'?"),
        ({"kv_cache": "NHD"}, "kv_cache", "valid dictionary"),
        ({"cudagraph_mode": "FULL_DECODE"}, "cudagraph_mode", "Did you mean 'FULL_DECODE_ONLY'?"),
        ({"cudagraph_mode": 2}, "cudagraph_mode", "valid string"),
    ],
)
def test_what_is_wrong(given: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(ValidationError) as error:
        PipelineConfig.model_validate({**BASE, **given})
    (line,) = error.value.errors()
    assert ".".join(map(str, line["loc"])) == where
    assert words in line["msg"]


@pytest.mark.parametrize("family", WITHOUT)
def test_a_family_without_a_cache_refuses_both(family: str) -> None:
    text = f"pipeline: {family}\nmodel: m\nkv_cache:\n  block_size: 8\ncudagraph_mode: FULL\n"
    with pytest.raises(ConfigError) as error:
        load_pipeline(text, environ={})
    cache, graph = error.value.problems
    assert f"kv_cache: models of pipeline {family} keep no KV cache. Leave it out" in cache
    assert f"cudagraph_mode: models of pipeline {family} keep no KV cache. Leave it out" in graph
    empty = load_pipeline(f"pipeline: {family}\nmodel: m\nkv_cache:\n  # block_size: 8\n", environ={})
    assert empty.kv_cache == KVCacheConfig()


@pytest.mark.usefixtures("wan_keeps_a_cache")
def test_the_refusal_names_the_families_that_keep_one() -> None:
    with pytest.raises(ValidationError, match=r"minimax_h3 keep no KV cache.*those that keep one: .*wan"):
        PipelineConfig.model_validate({"pipeline": "minimax_h3", "model": "m", "cudagraph_mode": "FULL"})


def test_the_json_schema_allows_a_family_without_a_cache_the_defaults_alone() -> None:
    schema = PipelineConfig.model_json_schema()
    assert schema["$defs"]["KVCacheConfig"]["properties"]["layout"]["enum"] == list(LAYOUTS)
    rules = {
        rule["if"]["properties"]["pipeline"]["const"]: rule["then"]["properties"] for rule in schema["allOf"]
    }
    for family in WITHOUT:
        assert rules[family]["cudagraph_mode"] == {"const": "NONE"}
        assert rules[family]["kv_cache"]["properties"]["block_size"] == {"const": None}
    for family in set(FAMILIES) - set(WITHOUT):
        assert "kv_cache" not in rules[family]
