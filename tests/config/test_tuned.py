"""`tuned_for`: strict, and compared with what is here."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from omni_attn.config import PipelineConfig, TunedFor

THEN: dict[str, Any] = {
    "device": "NVIDIA H200",
    "capability": "sm_90",
    "torch": "2.11.0",
    "cudnn": "9.19.0",
    "packages": {"fa3-fwd": "0.0.3"},
    "dtype": "bfloat16",
    "lengths": {"self": [32760, 32760], "cross": [32760, 512]},
}


def differences(**here: Any) -> tuple[str, ...]:
    return TunedFor.model_validate(THEN).differences(TunedFor.model_validate({**THEN, **here}))


def test_nothing_to_say_where_all_is_equal() -> None:
    assert differences() == ()


@pytest.mark.parametrize(
    ("here", "text"),
    [
        (
            {"device": "NVIDIA H100"},
            "device NVIDIA H200 (sm_90) then, NVIDIA H100 (sm_90) here",
        ),
        ({"device": None, "capability": "cpu"}, "device NVIDIA H200 (sm_90) then, cpu here"),
        ({"torch": "2.12.0"}, "torch 2.11.0 then, 2.12.0 here"),
        ({"cudnn": "9.20.0"}, "cudnn 9.19.0 then, 9.20.0 here"),
        ({"dtype": "float16"}, "dtype bfloat16 then, float16 here"),
        ({"packages": {"fa3-fwd": "0.0.4"}}, "fa3-fwd 0.0.3 then, 0.0.4 here"),
        ({"packages": {}}, "fa3-fwd 0.0.3 then, not installed here"),
        (
            {"packages": {"fa3-fwd": "0.0.3", "flash-attn-4": "4.0"}},
            "flash-attn-4 not installed then, 4.0 here",
        ),
        (
            {"lengths": {"self": [75600, 75600], "cross": [32760, 512]}},
            'role "self" 32760 x 32760 tokens then, 75600 x 75600 here',
        ),
    ],
)
def test_each_difference(here: dict[str, Any], text: str) -> None:
    assert differences(**here) == (text,)


@pytest.mark.parametrize("field", ["device", "torch", "cudnn", "dtype"])
def test_the_unknown_is_no_difference(field: str) -> None:
    assert differences(**{field: None}) == ()


def test_roles_that_are_not_there_are_no_difference() -> None:
    assert differences(lengths={"self": [32760, 32760], "more": [1, 1]}) == ()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"capability": None}, "valid string"),
        ({"torch": 2.11}, "valid string"),
        ({"packages": {"fa3-fwd": 3}}, "valid string"),
        ({"lengths": {"self": [1]}}, "Field required"),
        ({"lengths": {"self": [1, 0]}}, "greater than or equal to 1"),
        ({"lengths": {"self": "11"}}, "must be a list"),
        ({"dtype": "flot32"}, "'flot32' is not a dtype that models run in. Did you mean 'float32'?"),
        ({"dtype": "auto"}, "Valid: bfloat16, float16, float32"),
        ({"dtype": 32}, "valid string"),
        ({"devise": "x"}, "Did you mean 'device'?"),
    ],
)
def test_strict(bad: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words.replace("?", r"\?")):
        PipelineConfig.model_validate({"pipeline": "wan", "model": "x", "tuned_for": {**THEN, **bad}})


def test_round_trip_and_hash() -> None:
    config = PipelineConfig.model_validate({"pipeline": "wan", "model": "x", "tuned_for": THEN})
    for loaded in (
        PipelineConfig.model_validate(config.model_dump()),
        PipelineConfig.model_validate_json(config.model_dump_json(exclude_unset=True)),
    ):
        assert loaded == config and hash(loaded) == hash(config)
