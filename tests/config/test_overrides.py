"""`--set KEY=VALUE` reaches every key, however the file writes the thing it replaces."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_attn.config import AttentionConfig, load_pipeline
from omni_attn.errors import ConfigError

BASE: dict[str, Any] = {"pipeline": "wan", "model": "wan-tiny"}


def attention(section: Any, *overrides: str) -> AttentionConfig:
    source = {**BASE, "attention": section}
    before = copy.deepcopy(source)
    loaded = load_pipeline(source, overrides=overrides, environ={}).attention
    assert source == before, "the source stays as it was"
    assert load_pipeline(yaml.safe_dump(source), overrides=overrides, environ={}).attention == loaded
    return loaded


def roles(per_role: Any, *overrides: str) -> AttentionConfig:
    return attention({"per_role": per_role}, *(f"attention.per_role.{override}" for override in overrides))


def same(per_role: Any) -> AttentionConfig:
    return AttentionConfig.model_validate({"per_role": per_role})


def test_any_key_of_the_file() -> None:
    config = load_pipeline(
        {**BASE, "generation": {"seed": 1, "height": 128}},
        overrides=[
            "model=wan2.1-t2v-1.3b",
            "generation.seed=3",
            "generation.guidance_scale=5e-1",
            "generation.prompt=a cat: running, 50 % # faster",
            "device=cpu",
            "output=a/b=c",
        ],
        environ={},
    )
    assert (config.model, config.device, config.output) == ("wan2.1-t2v-1.3b", "cpu", "a/b=c")
    generation = config.generation
    assert (generation.seed, generation.height, generation.guidance_scale) == (3, 128, 0.5)
    assert generation.prompt == "a cat: running, 50 % # faster"


def test_the_last_one_wins_and_null_unsets() -> None:
    overrides = ["generation.seed=3", "generation.prompt=x", "generation.seed=4", "generation.prompt="]
    generation = load_pipeline(BASE, overrides=overrides, environ={}).generation
    assert (generation.seed, generation.prompt) == (4, None)


@pytest.mark.parametrize("section", [None, {}, {"per_role": None}, {"default": None}])
def test_into_a_section_that_is_empty(section: Any) -> None:
    assert attention(section, "attention.per_role.cross.backend=sdpa") == same({"cross": "SDPA"})
    assert attention(section, "attention.per_role.cross=sdpa") == same({"cross": "SDPA"})


@pytest.mark.parametrize("default", ["CUDNN", {"backend": "CUDNN"}, None, "auto"])
def test_the_default_in_any_form(default: Any) -> None:
    expected = AttentionConfig.model_validate({"default": {"backend": "FLASH_ATTN", "variant": "fa3"}})
    overrides = ["attention.default.backend=flash_attn", "attention.default.variant=fa3"]
    assert attention({"default": default}, *overrides) == expected
    assert (
        attention({"default": default}, "attention.default={backend: FLASH_ATTN, variant: FA3}") == expected
    )
    assert attention({"default": default}, "attention.default=auto") == AttentionConfig()


def test_a_whole_section_or_a_name_for_it() -> None:
    assert attention({"default": "CUDNN"}, "attention=sdpa").resolve("x")[1] == "default"
    assert attention("CUDNN", "attention.per_role.self=sdpa") == AttentionConfig.model_validate(
        {"default": "CUDNN", "per_role": {"self": "SDPA"}}
    )
    assert attention("CUDNN", "attention.default.variant=x").default is not None
    assert attention({"default": "CUDNN"}, "attention={per_role: {self: SDPA}}") == same({"self": "SDPA"})
    assert (
        roles({"self": "CUDNN"}) != attention({}, "attention.per_role={self: SDPA}") == same({"self": "SDPA"})
    )


BLOCK = {"topk": 8, "tile_size": [4, 8, 8]}
VSA = {"backend": "VSA", "fastvideo_vsa": BLOCK}


@pytest.mark.parametrize(
    ("per_role", "override", "expected"),
    [
        ({"self": "CUDNN"}, "self=sdpa", {"self": "SDPA"}),
        ({"self": "FLASH_ATTN"}, "self.variant=fa3", {"self": {"backend": "FLASH_ATTN", "variant": "fa3"}}),
        ({"self": "auto"}, "self.backend=sdpa", {"self": "SDPA"}),
        ({"self": "CUDNN"}, "self=auto", {}),
        ({"self": VSA}, "self.fastvideo_vsa.topk=9", {"self": {**VSA, "fastvideo_vsa": {**BLOCK, "topk": 9}}}),
        ({"self": "VSA"}, "self.fastvideo_vsa.topk=9", {"self": {"backend": "VSA", "fastvideo_vsa_topk": 9}}),
        ({"self": VSA}, "self=vsa", {"self": "VSA"}),
        ({"self": "SDPA"}, "self.fallback=[CUDNN, SAGE]", {"self": {"backend": "SDPA", "fallback": ["CUDNN", "SAGE"]}}),
        ({"cross": "SDPA"}, "cross.image.backend=cudnn", {"cross": "SDPA", "cross.image": "CUDNN"}),
        ({"cross": "SDPA"}, "cross.image=cudnn", {"cross": "SDPA", "cross.image": "CUDNN"}),
        ({"a": {"b": {"backend": "CUDNN"}}}, "a.b.backend=sdpa", {"a.b": "SDPA"}),
        ({"a": {"b": {"backend": "CUDNN"}}}, "a.b=sdpa", {"a.b": "SDPA"}),
        ({"a": {"b.c": {"backend": "CUDNN"}}}, "a.b.c.variant=x", {"a.b.c": {"backend": "CUDNN", "variant": "x"}}),
        ({"a": {"b": {"backend": "CUDNN"}}}, "a.c=sdpa", {"a.b": "CUDNN", "a.c": "SDPA"}),
        ({"a": {"b": {"c": {"backend": "CUDNN"}}}}, "a.b=sdpa", {"a.b.c": "CUDNN", "a.b": "SDPA"}),
        ({"a": {"b": {"backend": "CUDNN"}}}, "a.backend=sdpa", {"a.b": "CUDNN", "a": "SDPA"}),
        ({"a": {"b": {"c": {"backend": "CUDNN"}}}}, "a=sdpa", {"a.b.c": "CUDNN", "a": "SDPA"}),
        ({"a": {"b": {"backend": "CUDNN"}}, "a.b.c": "SAGE"}, "a.b.c=sdpa", {"a.b": "CUDNN", "a.b.c": "SDPA"}),
        ({"a.quality": "CUDNN"}, "a.quality=sdpa", {"a.quality": "SDPA"}),
        ({}, "a.quality=sdpa", {"a.quality": "SDPA"}),
    ],
)  # fmt: skip
def test_a_role_in_any_form(per_role: Any, override: str, expected: Any) -> None:
    assert roles(per_role, override) == same(expected)


BAD = [
    (
        {"self": "SDPA"},
        "attention.per_role.self.backnd=X",
        "attention.per_role.self.backnd: unknown key. Did you mean 'backend'?",
    ),
    (
        {"self": {"backend": "SDPA"}},
        "attention.per_role.self.quont.dtype_qk=int8",
        "attention.per_role.self.quont.dtype_qk: unknown key. Did you mean 'quant'?",
    ),
    (
        {"self": "TRTLLM"},
        "attention.per_role.self.quant.dtype_kq=int8",
        "attention.per_role.self.quant.dtype_kq: unknown key. Did you mean 'dtype_qk'?",
    ),
    (
        {},
        "attention.per_role.self.variant=fa3",
        "attention.per_role.self.backend: this key is required",
    ),
    (
        {},
        "attention.per_role.backend=SDPA",
        "attention.per_role.backend: no role stands before 'backend'. Write attention.per_role.<role>.backend",
    ),
    (
        {"self": {"backend": "SDPA", "fallback": ["CUDNN"]}},
        "attention.per_role.self.fallback.0=SAGE",
        "attention.per_role.self.fallback holds ['CUDNN'], which has no key '0': set it as a whole",
    ),
    ({}, "attention.per_role.self=3", "attention.per_role.self: a role needs a backend name or a mapping"),
    ({}, "attention.per_role.self=FLASH ATTN", "attention.per_role.self.backend: a backend name is one word"),
    ({}, "generation.seed=three", "generation.seed: input should be a valid integer, found 'three'"),
    ({}, "generation.seed='3'", "generation.seed: input should be a valid integer, found '3'"),
    ({}, "generation.height=480.0", "generation.height: input should be a valid integer, found 480.0"),
    ({}, "model.name=x", "model holds 'wan-tiny', which has no key 'name': set it as a whole"),
    ({}, "attenshun.default=SDPA", "attenshun: unknown key. Did you mean 'attention'?"),
    ({}, "generation.seed", "write KEY=VALUE"),
    ({}, "=3", "write KEY=VALUE"),
    ({}, "generation..seed=3", "write KEY=VALUE"),
    ({}, "attention.default=[SDPA", "line 1: not valid YAML"),
]


@pytest.mark.parametrize(("per_role", "override", "problem"), BAD, ids=[row[1] for row in BAD])
def test_a_bad_override_names_itself(per_role: Any, override: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_pipeline({**BASE, "attention": {"per_role": per_role}}, overrides=[override], environ={})
    (line,) = error.value.problems
    assert line.startswith(f"--set {override}: {problem}")


def test_a_misspelt_field_in_the_file_is_no_role_for_an_override(tmp_path: Path) -> None:
    path = tmp_path / "wan.yaml"
    path.write_text("pipeline: wan\nmodel: m\nattention:\n  per_role:\n    self:\n      backnd: SDPA\n")
    with pytest.raises(ConfigError) as error:
        load_pipeline(path, overrides=["attention.per_role.self.backend=CUDNN"], environ={})
    assert error.value.problems == (
        f"{path}:6: attention.per_role.self.backnd: unknown key. Did you mean 'backend'?",
    )


def test_places_of_file_and_override_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "wan.yaml"
    path.write_text("pipeline: wan\nmodel: m\nattention:\n  per_role:\n    self: {backend: SDPA, zzz: 1}\n")
    with pytest.raises(ConfigError) as error:
        load_pipeline(path, overrides=["attention.per_role.self.variant=3"], environ={})
    assert [problem.split(": attention")[0] for problem in error.value.problems] == [
        "--set attention.per_role.self.variant=3",
        f"{path}:5",
    ]
    with pytest.raises(ConfigError) as error:  # what the override replaced is nobody's problem any more
        load_pipeline(path, overrides=["attention.per_role.self={backend: 3}"], environ={})
    assert [problem.split(": attention")[0] for problem in error.value.problems] == [
        "--set attention.per_role.self={backend: 3}"
    ]


def test_what_an_override_brought_into_being_is_its_own() -> None:
    with pytest.raises(ConfigError) as error:
        load_pipeline(
            {**BASE, "attention": {"per_role": {"cross": {"backend": 3}}}},
            overrides=["attention.per_role.self.variant=fa3", "sampler.order=2"],
            environ={},
        )
    assert error.value.problems == (
        "attention.per_role.cross.backend: a backend is named by text, found 3",
        "--set attention.per_role.self.variant=fa3: attention.per_role.self.backend: this key is required",
        "--set sampler.order=2: sampler: unknown key. Valid keys: pipeline, model, adapter, attention, generation, "
        "device, dtype, parallel, kv_cache, cudagraph_mode, output, tuned_for",
    )
