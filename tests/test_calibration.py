"""What config.json says about skip-softmax, and what it says that nobody can use."""

from __future__ import annotations

from typing import Any

import pytest

from omni_attn.calibration import SkipSoftmaxCalibration, SkipSoftmaxCurve, component_of, read_calibration
from omni_attn.errors import ConfigError

CURVE = SkipSoftmaxCurve(2822.6209952, 4.3882506235)


def config(**group: Any) -> dict[str, Any]:
    usual = {
        "algorithm": "skip_softmax",
        "targets": ["WanAttention"],
        "threshold_scale_factor": {
            "formula": "a * exp(b * target_sparsity)",
            "coefficients": {"a": CURVE.a, "b": CURVE.b},
        },
        "target_sparsity": 0.5,
        "disabled_until_timestep": 0.8,
    }
    return {"sparse_attention_config": {"config_groups": {"group_0": usual | group}}, "num_layers": 40}


def test_a_published_curve() -> None:
    calibration = read_calibration(config())
    assert calibration == SkipSoftmaxCalibration(CURVE)
    assert CURVE.factor(0.7) == pytest.approx(60912.68, abs=0.01)
    assert CURVE.factor(0.0) == CURVE.a


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"sparse_attention_config": None},
        {"sparse_attention_config": {}},
        {"sparse_attention_config": {"config_groups": {"g": {"algorithm": "other"}}}},
    ],
)
def test_no_calibration_is_none(given: dict[str, Any]) -> None:
    assert read_calibration(given) is None


@pytest.mark.parametrize("formula", ["a*exp(b*target_sparsity)", " a * exp( b*target_sparsity )\n"])
def test_blanks_in_the_formula_do_not_matter(formula: str) -> None:
    scale = {"formula": formula, "coefficients": {"a": 2, "b": 3}}
    assert read_calibration(config(threshold_scale_factor=scale)) == SkipSoftmaxCalibration(
        SkipSoftmaxCurve(2.0, 3.0)
    )


def test_older_files_call_the_coefficients_prefill_and_name_no_algorithm() -> None:
    older = config(
        threshold_scale_factor={
            "formula": "a * exp(b * target_sparsity)",
            "prefill": {"a": 2, "b": 3},
            "decode": {"a": 9, "b": 9},
        }
    )
    del older["sparse_attention_config"]["config_groups"]["group_0"]["algorithm"]
    assert read_calibration(older) == SkipSoftmaxCalibration(SkipSoftmaxCurve(2.0, 3.0))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"threshold_scale_factor": {"formula": "exp(log_a + b * target_sparsity)"}}, ["log_a", "formula"]),
        ({"threshold_scale_factor": {"coefficients": {"a": 1, "b": 1}}}, ["formula", "None"]),
        ({"threshold_scale_factor": 5.0}, ["threshold_scale_factor", "5.0", "mapping"]),
        ({"threshold_scale_factor": {"formula": "a*exp(b*target_sparsity)"}}, ["prefill", "None"]),
        *(
            (
                {
                    "threshold_scale_factor": {
                        "formula": "a*exp(b*target_sparsity)",
                        "coefficients": {"a": a, "b": 1.0},
                    }
                },
                ["coefficient a", str(a)],
            )
            for a in ("1", True, float("nan"), None, 0, -2.0)
        ),
        ({"ignore": "blocks.0"}, ["ignore", "blocks.0"]),
        ({"ignore": [1]}, ["ignore", "1"]),
    ],
)
def test_what_cannot_be_used_is_an_error_with_its_place(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_calibration(config(**given), "some/config.json")
    for word in ["some/config.json: sparse_attention_config", *words]:
        assert word in str(caught.value)


def test_two_groups_contradict_one_another() -> None:
    twice = config()
    groups = twice["sparse_attention_config"]["config_groups"]
    groups["group_1"] = groups["group_0"]
    with pytest.raises(ConfigError, match=r"group_0.*group_1"):
        read_calibration(twice)


@pytest.mark.parametrize("section", [5, [1], {"config_groups": 3}, {"config_groups": {"g": 4}}])
def test_a_section_of_another_shape_is_an_error(section: object) -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        read_calibration({"sparse_attention_config": section})


@pytest.mark.parametrize(
    ("pattern", "name", "ignored"),
    [
        ("blocks.0.attn1", "transformer.blocks.0.attn1", True),
        ("blocks.0.attn1", "transformer.blocks.0.attn1.attention", True),  # what lies inside
        ("blocks.0.attn1", "blocks.0.attn1.attention", True),
        ("blocks.0.attn1", "transformer.blocks.0.attn10", False),
        ("blocks.1", "transformer.blocks.11.attn1", False),
        ("*attn2", "transformer.blocks.7.attn2.attention", True),
        ("transformer.blocks.0.*", "transformer.blocks.0.attn1", True),
        ("blocks.0.attn1", "transformer._orig_mod.blocks.0.attn1.attention", True),
        ("transformer.blocks.0.attn1", "transformer.blocks.0._orig_mod.attn1", True),
        ("blocks.[01].attn1", "transformer.blocks.1.attn1", True),
        ("BLOCKS.0.attn1", "transformer.blocks.0.attn1", False),
        ("attn1", "transformer.blocks.0.attn1", False),
    ],
)
def test_ignored_layers_stay_dense(pattern: str, name: str, ignored: bool) -> None:
    calibration = read_calibration(config(ignore=[pattern]))
    assert calibration is not None
    assert calibration.of_layer(name, "transformer") == ("dense" if ignored else CURVE)


def test_patterns_may_stand_beside_the_groups() -> None:
    given = config(ignore=["blocks.0"])
    given["sparse_attention_config"]["ignore"] = ["blocks.1"]
    calibration = read_calibration(given)
    assert calibration is not None and set(calibration.ignore) == {"blocks.0", "blocks.1"}


def test_the_longest_component_owns_a_layer() -> None:
    components = dict.fromkeys(("transformer", "transformer_2", "transformer.sub"))
    assert component_of("transformer.blocks.0", components) == "transformer"
    assert component_of("transformer_2.blocks.0", components) == "transformer_2"
    assert component_of("transformer.sub.attn", components) == "transformer.sub"
    assert component_of("transformer_3.blocks.0", components) is None
