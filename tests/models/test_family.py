"""Every family's module has what the commands call, with the same arguments."""

from __future__ import annotations

import inspect

import pytest

from omni_attn.config import MiniMaxH3GenerationConfig, PipelineConfig, WanGenerationConfig
from omni_attn.config.families import FAMILIES as CONFIGURED
from omni_attn.errors import ConfigError
from omni_attn.models import _FAMILIES, get_family
from omni_attn.models.family import ModelFamily, PreparedRun, generation_as


def members(protocol: type) -> dict[str, object]:
    return {name: value for name, value in vars(protocol).items() if not name.startswith("_")}


def test_configuration_and_models_know_the_same_families() -> None:
    assert set(_FAMILIES) == set(CONFIGURED)


@pytest.mark.parametrize("name", list(_FAMILIES))
def test_a_family_has_every_function(name: str) -> None:
    family = get_family(name)
    for function, wanted in members(ModelFamily).items():
        assert callable(wanted)
        _, *arguments = inspect.signature(wanted).parameters.values()  # self
        found = inspect.signature(getattr(family, function)).parameters.values()
        assert [(a.name, a.kind, a.default) for a in found] == [
            (a.name, a.kind, a.default) for a in arguments
        ], function


@pytest.mark.parametrize("name", list(_FAMILIES))
def test_a_prepared_run_has_every_member(name: str) -> None:
    made = get_family(name).PreparedRun  # type: ignore[attr-defined]
    known = set(vars(made)) | set(inspect.signature(made).parameters)
    assert set(members(PreparedRun)) <= known


@pytest.mark.parametrize("name", ["wam", "minimax-h3"])
def test_an_unknown_family_is_named_with_the_nearest(name: str) -> None:
    near = {"wam": "wan", "minimax-h3": "minimax_h3"}[name]
    with pytest.raises(ConfigError, match=f"Did you mean '{near}'. Families: wan, wan_causal, minimax_h3"):
        get_family(name)


def test_a_request_reaches_its_own_family_alone() -> None:
    config = PipelineConfig.model_validate({"pipeline": "minimax_h3", "model": "m"})
    assert generation_as(config, MiniMaxH3GenerationConfig) is config.generation
    with pytest.raises(AssertionError, match="minimax_h3 came to the family of WanGenerationConfig"):
        generation_as(config, WanGenerationConfig)
