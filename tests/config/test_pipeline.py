"""The pipeline file: defaults, ranges, and a JSON Schema that describes what is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from omni_attn.config import (
    AttentionConfig,
    GenerationConfig,
    MiniMaxH3GenerationConfig,
    PipelineConfig,
    WanGenerationConfig,
)
from omni_attn.config.families import FAMILIES, Generation
from omni_attn.config.loading import load_pipeline
from omni_attn.errors import ConfigError

BASE: dict[str, Any] = {"pipeline": "wan", "model": "wan-tiny"}
H3: dict[str, Any] = {"pipeline": "minimax_h3", "model": "minimax-h3-tiny"}


def test_defaults() -> None:
    config = PipelineConfig.model_validate(BASE)
    assert config.attention == AttentionConfig()
    assert (config.device, config.dtype, config.output) == ("auto", "auto", "omni_attn_output")
    assert config.generation.model_dump() == {
        "height": 480,
        "width": 832,
        "num_frames": 81,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
        "guidance_scale_2": None,
        "seed": 0,
        "prompt": None,
        "negative_prompt": None,
        "prompt_embeds": None,
        "image": None,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("height", 16),
        ("width", 1280),
        ("num_frames", 1),
        ("num_frames", 121),
        ("num_inference_steps", 1),
        ("guidance_scale", 0),
        ("guidance_scale_2", 3.5),
        ("seed", 2**64 - 1),
        ("prompt", ""),
        ("image", "seeded"),
    ],
)
def test_good_generation(field: str, value: Any) -> None:
    assert getattr(WanGenerationConfig.model_validate({field: value}), field) == value


BAD_GENERATION = [
    ("height", 0, "greater than or equal to 1"),
    ("height", 481, "Nearest: 480 or 496"),
    ("height", 8, "Nearest: 16"),
    ("height", True, "valid integer"),
    ("width", -16, "greater than or equal to 1"),
    ("width", "832", "valid integer"),
    ("width", 832.0, "valid integer"),
    ("width", 840, "Nearest: 832 or 848"),
    ("num_frames", 0, "greater than or equal to 1"),
    ("num_frames", 80, "Nearest: 77 or 81"),
    ("num_frames", 2, "Nearest: 1 or 5"),
    ("num_inference_steps", 0, "greater than or equal to 1"),
    ("num_inference_steps", 2.5, "valid integer"),
    ("guidance_scale", -1, "finite and in [0, infinity)"),
    ("guidance_scale", float("nan"), "finite and in [0, infinity)"),
    ("guidance_scale", float("inf"), "finite and in [0, infinity)"),
    ("guidance_scale", "5", "valid number"),
    ("guidance_scale_2", -0.5, "finite and in [0, infinity)"),
    ("seed", -1, "greater than or equal to 0"),
    ("seed", 2**64, "less than"),
    ("seed", False, "valid integer"),
    ("prompt", 3, "valid string"),
    ("negative_prompt", b"x", "valid string"),
    ("prompt_embeds", "", "at least 1 character"),
    ("prompt_embeds", b"x", "valid string"),
    ("image", "", "at least 1 character"),
    ("heigth", 480, "Did you mean 'height'?"),
]


@pytest.mark.parametrize(("field", "value", "words"), BAD_GENERATION)
def test_bad_generation(field: str, value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as error:
        PipelineConfig.model_validate({**BASE, "generation": {field: value}})
    (line,) = error.value.errors()
    assert line["loc"] == ("generation", field)
    assert words in line["msg"]


@pytest.mark.parametrize("kind", FAMILIES.values())
def test_a_prompt_and_embeddings_exclude_each_other(kind: type[GenerationConfig]) -> None:
    with pytest.raises(ValidationError, match="either prompt or prompt_embeds"):
        kind.model_validate({"prompt": "a cat", "prompt_embeds": "cat.safetensors"})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("pipeline", "wam", "Did you mean 'wan'? Known: wan, wan_causal, minimax_h3"),
        ("pipeline", "minimax-h3", "Did you mean 'minimax_h3'? Known: wan, wan_causal, minimax_h3"),
        ("pipeline", "zzz", "unknown pipeline 'zzz'. Known: wan, wan_causal, minimax_h3"),
        ("pipeline", None, "valid string"),
        ("model", "", "at least 1 character"),
        ("model", 3, "valid string"),
        ("device", "", "at least 1 character"),
        ("dtype", "bf16", "'bfloat16'"),
        ("output", "", "at least 1 character"),
        ("attention", 3, "valid dictionary"),
        ("generation", "x", "valid dictionary"),
    ],
)
def test_bad_pipeline(key: str, value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as error:
        PipelineConfig.model_validate({**BASE, key: value})
    (line,) = error.value.errors()
    assert line["loc"] == (key,)
    assert words in line["msg"]


def test_sections_may_be_empty_and_paths_may_be_paths() -> None:
    config = PipelineConfig.model_validate(
        {**BASE, "attention": None, "generation": None, "output": Path("a/b"), "model": Path("m")}
    )
    assert config == PipelineConfig.model_validate({**BASE, "output": str(Path("a/b")), "model": "m"})


def test_attention_may_be_a_name() -> None:
    config = PipelineConfig.model_validate({**BASE, "attention": "sdpa"})
    assert config.attention == AttentionConfig.model_validate({"default": "TORCH_SDPA"})


@pytest.mark.parametrize("base", [BASE, H3])
def test_round_trip_and_hash(base: dict[str, Any]) -> None:
    config = PipelineConfig.model_validate(
        {**base, "attention": {"per_role": {"a": {"b": {"backend": "VSA"}}}}}
    )
    for loaded in (
        PipelineConfig.model_validate(config.model_dump()),
        PipelineConfig.model_validate(config.model_dump(mode="json")),
        PipelineConfig.model_validate_json(config.model_dump_json(exclude_unset=True)),
    ):
        assert loaded == config
        assert hash(loaded) == hash(config)


def test_the_json_schema_describes_every_field() -> None:
    schema = PipelineConfig.model_json_schema()
    objects = {"PipelineConfig": schema, **schema["$defs"]}
    assert {
        "PipelineConfig",
        "AttentionConfig",
        "AttentionSpec",
        *(kind.__name__ for kind in FAMILIES.values()),
    } <= set(objects)
    for name, entry in objects.items():
        assert entry["additionalProperties"] is False, name
        for field, properties in entry["properties"].items():
            assert properties.get("description"), f"{name}.{field}"
    json.dumps(schema)


def test_the_json_schema_knows_every_accepted_form() -> None:
    schema = PipelineConfig.model_json_schema()
    spec = {"$ref": "#/$defs/AttentionSpec"}
    config = schema["$defs"]["AttentionConfig"]["properties"]
    forms = [
        config["default"]["anyOf"],
        config["per_role"]["additionalProperties"]["anyOf"],
        schema["$defs"]["AttentionSpec"]["properties"]["fallback"]["items"]["anyOf"],
    ]
    for form in forms:
        assert spec in form
        assert any(entry.get("type") == "string" for entry in form)
    assert "fastvideo_vsa_topk" in schema["$defs"]["AttentionSpec"]["properties"]
    assert "provider" in schema["$defs"]["FastVideoVSASpec"]["properties"]
    assert schema["properties"]["pipeline"]["enum"] == list(FAMILIES)
    for kind, step in ((WanGenerationConfig, 16), (MiniMaxH3GenerationConfig, 32)):
        assert schema["$defs"][kind.__name__]["properties"]["height"]["multipleOf"] == step


def test_the_json_schema_knows_each_family_s_section() -> None:
    schema = PipelineConfig.model_json_schema()
    sections = {name: {"$ref": f"#/$defs/{kind.__name__}"} for name, kind in FAMILIES.items()}
    assert schema["properties"]["generation"]["anyOf"] == list(sections.values())
    assert "default" not in schema["properties"]["generation"]
    told = {
        rule["if"]["properties"]["pipeline"]["const"]: rule["then"]["properties"]["generation"]
        for rule in schema["allOf"]
    }
    assert told == sections
    assert all(rule["if"]["required"] == ["pipeline"] for rule in schema["allOf"])
    wan, causal, minimax_h3 = (rule["then"]["properties"] for rule in schema["allOf"])
    assert wan["adapter"] == {"type": "null"} == causal["adapter"] and "adapter" not in minimax_h3


def test_defaults_of_minimax_h3() -> None:
    assert PipelineConfig.model_validate(H3).generation.model_dump() == {
        "height": 768,
        "width": 1344,
        "num_frames": 124,
        "num_inference_steps": 50,
        "seed": 0,
        "prompt": None,
        "prompt_embeds": None,
        "text_tokens": 30,
        "image": None,
        "last_image": None,
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[
            ("height", 32),
            ("width", 1344),
            ("num_frames", 5),
            ("num_frames", 345),
            ("num_inference_steps", 2),
        ],
        *[("text_tokens", 1), ("image", "seeded"), ("last_image", "last.png"), ("seed", 7)],
    ],
)
def test_good_generation_of_minimax_h3(field: str, value: Any) -> None:
    config = PipelineConfig.model_validate({**H3, "generation": {field: value}})
    assert isinstance(config.generation, MiniMaxH3GenerationConfig)
    assert getattr(config.generation, field) == value
    assert config.generation.model_fields_set == {field}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("height", 784, "positive multiple of 32, found 784. Nearest: 768 or 800"),
        ("width", 16, "found 16. Nearest: 32"),
        ("num_frames", 120, "5 more than a multiple of 17, found 120. Nearest: 107 or 124"),
        ("num_frames", 6, "Nearest: 5 or 22"),
        ("num_frames", 4, "greater than or equal to 5"),
        ("num_frames", 124.0, "valid integer"),
        ("num_inference_steps", 1, "greater than or equal to 2"),
        ("text_tokens", 0, "greater than or equal to 1"),
        ("guidance_scale", 5.0, "guidance-distilled"),
        ("guidance_scale_2", 5.0, "guidance-distilled"),
        ("negative_prompt", "x", "guidance-distilled"),
        ("last_imgae", "x", "Did you mean 'last_image'?"),
    ],
)
def test_bad_generation_of_minimax_h3(field: str, value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as error:
        PipelineConfig.model_validate({**H3, "generation": {field: value}})
    (line,) = error.value.errors()
    assert line["loc"] == ("generation", field)
    assert words in line["msg"]


@pytest.mark.parametrize("given", [{"prompt": "a fox"}, {"prompt_embeds": "fox.safetensors"}])
def test_rows_of_a_made_up_prompt_need_one(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=f"{next(iter(given))} is given, and has rows of its own"):
        MiniMaxH3GenerationConfig.model_validate({**given, "text_tokens": 20})
    config = MiniMaxH3GenerationConfig.model_validate(given)
    assert MiniMaxH3GenerationConfig.model_validate(config.model_dump()) == config


def test_every_key_of_another_family_says_why_it_is_none_here() -> None:
    keys = {key for kind in FAMILIES.values() for key in kind.model_fields}
    for name, kind in FAMILIES.items():
        assert set(kind.absent) == keys - set(kind.model_fields), name
        for key in kind.absent:
            with pytest.raises(ConfigError) as error:
                load_pipeline({"pipeline": name, "model": "m"}, overrides=[f"generation.{key}=3"], environ={})
            assert str(error.value) == f"--set generation.{key}=3: generation.{key}: {kind.absent[key]}"


def test_families_stand_in_the_order_of_the_union() -> None:
    assert get_args(Generation) == tuple(FAMILIES.values())  # the schema pairs them by place


def test_a_section_is_never_read_by_another_family_s_rules() -> None:
    config = PipelineConfig.model_validate({**H3, "generation": {"height": 64, "width": 64, "num_frames": 5}})
    assert isinstance(config.generation, MiniMaxH3GenerationConfig)  # Wan would take it as well
    with pytest.raises(ValidationError, match="instance of WanGenerationConfig"):
        PipelineConfig.model_validate({**BASE, "generation": config.generation})
    same = PipelineConfig.model_validate({**H3, "generation": config.generation})
    assert same == config


def test_a_section_of_no_family_is_not_judged() -> None:
    with pytest.raises(ValidationError) as error:
        PipelineConfig.model_validate({"pipeline": "zzz", "model": "m", "generation": {"height": 1}})
    assert [line["loc"] for line in error.value.errors()] == [("pipeline",)]
    with pytest.raises(ValidationError) as error:
        PipelineConfig.model_validate({"pipeline": "zzz", "model": "m", "generation": 3})
    assert [line["loc"] for line in error.value.errors()] == [("pipeline",), ("generation",)]


def test_a_section_of_a_misspelt_family_is_judged_by_the_nearest() -> None:
    with pytest.raises(ValidationError) as error:
        PipelineConfig.model_validate({"pipeline": "minimax_h4", "model": "m", "generation": {"height": 16}})
    assert [line["loc"] for line in error.value.errors()] == [("pipeline",), ("generation", "height")]


def test_a_file_turned_to_another_family() -> None:
    """`--set pipeline=...` alone refuses the keys that the new family lacks; others stay."""
    file = {**BASE, "generation": {"seed": 3, "guidance_scale": 2.0, "height": 64}}
    with pytest.raises(ConfigError, match=r"^generation\.guidance_scale: MiniMax-H3 is guidance-distilled"):
        load_pipeline(file, overrides=["pipeline=minimax_h3"], environ={})
    del file["generation"]["guidance_scale"]
    generation = load_pipeline(file, overrides=["pipeline=minimax_h3"], environ={}).generation
    assert (generation.seed, generation.height, generation.width) == (3, 64, 1344)


def test_an_adapter_belongs_to_a_family_that_has_them() -> None:
    assert PipelineConfig.model_validate(H3 | {"adapter": "fasth3"}).adapter == "fasth3"
    with pytest.raises(ValidationError, match=r"pipeline wan fuses none.*minimax_h3"):
        PipelineConfig.model_validate(BASE | {"adapter": "fasth3"})
