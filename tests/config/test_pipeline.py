"""The pipeline file: defaults, ranges, and a JSON Schema that describes what is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from omni_attn.config import AttentionConfig, GenerationConfig, PipelineConfig

BASE: dict[str, Any] = {"pipeline": "wan", "model": "wan-tiny"}


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
    assert getattr(GenerationConfig.model_validate({field: value}), field) == value


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


def test_a_prompt_and_embeddings_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="either prompt or prompt_embeds"):
        GenerationConfig.model_validate({"prompt": "a cat", "prompt_embeds": "cat.safetensors"})


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("pipeline", "wam", "Did you mean 'wan'? Known: wan"),
        ("pipeline", "zzz", "unknown pipeline 'zzz'. Known: wan"),
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


def test_round_trip_and_hash() -> None:
    config = PipelineConfig.model_validate(
        {**BASE, "attention": {"per_role": {"a": {"b": {"backend": "VSA"}}}}}
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
    assert {"PipelineConfig", "AttentionConfig", "AttentionSpec", "GenerationConfig"} <= set(objects)
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
    assert schema["properties"]["pipeline"]["enum"] == ["wan"]
    assert schema["$defs"]["GenerationConfig"]["properties"]["height"]["multipleOf"] == 16
