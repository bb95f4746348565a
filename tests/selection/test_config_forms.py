"""One choice in every form a person may hand over, at every door; where there is one, the environment is not asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_attn.config import AttentionConfig
from omni_attn.errors import ConfigError
from omni_attn.layer import Attention
from omni_attn.selector import get_attn_backend_for_role, select, use_attention_config
from omni_attn.testing import fake_device
from tests.selection.stubs import ask

H100 = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"}, cudnn=91900)  # whose own default is another one
Door = Callable[[Any], tuple[str, str]]


def of_layer(layer: Attention) -> tuple[str, str]:
    assert layer.selection is not None
    return layer.selection.backend, layer.selection.source


def by_layer(config: Any) -> tuple[str, str]:
    with use_attention_config(AttentionConfig(), platform=H100):
        return of_layer(Attention(2, 64, role="self", config=config))


def by_scope(config: Any) -> tuple[str, str]:
    with use_attention_config(config, platform=H100):
        return of_layer(Attention(2, 64, role="self"))


def by_select(config: Any) -> tuple[str, str]:
    selection = select(ask(), config, H100)
    return selection.backend, selection.source


def by_role(config: Any) -> tuple[str, str]:
    backend, spec = get_attn_backend_for_role("self", 64, config=config, platform=H100)
    assert spec is not None and spec.backend == backend.get_name()
    return backend.get_name(), select(ask(), config, H100).source


each_door = pytest.mark.parametrize("door", [by_layer, by_scope, by_select, by_role])
DEFAULTS: dict[str, Any] = {
    "object": AttentionConfig(default="TORCH_SDPA"),
    "mapping": {"default": {"backend": "TORCH_SDPA"}},
    "short mapping": {"default": "torch_sdpa"},
    "JSON": '{"default": {"backend": "TORCH_SDPA"}}',
    "YAML": "default:\n  backend: TORCH_SDPA\n",
    "short YAML": "default: sdpa",
    "name": "TORCH_SDPA",
    "alias": "sdpa",
}
ROLES: dict[str, Any] = {
    "object": AttentionConfig(per_role={"self": "TORCH_SDPA"}),
    "mapping": {"per_role": {"self": {"backend": "TORCH_SDPA"}}},
    "short mapping": {"per_role": {"self": "sdpa"}},
    "JSON": '{"per_role": {"self": "SDPA"}}',
    "YAML": "per_role:\n  self: {backend: TORCH_SDPA}\n",
}


@each_door
@pytest.mark.parametrize("config", DEFAULTS.values(), ids=DEFAULTS)
def test_a_default_in_every_form(door: Door, config: Any) -> None:
    assert door(config) == ("TORCH_SDPA", "default")


@each_door
@pytest.mark.parametrize("config", ROLES.values(), ids=ROLES)
def test_a_role_in_every_form(door: Door, config: Any) -> None:
    assert door(config) == ("TORCH_SDPA", "per_role['self']")


@each_door
def test_a_file(door: Door, tmp_path: Path) -> None:
    path = tmp_path / "attention.yaml"
    path.write_text("default: TORCH_SDPA\n", encoding="utf-8")
    for form in (path, str(path)):
        assert door(form) == ("TORCH_SDPA", "default")


@each_door
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"defalt": "TORCH_SDPA"}, "default"),
        ({"per_role": {"self": {"backnd": "TORCH_SDPA"}}}, "backend"),
        ('{"default": {"backend": ""}}', "backend"),
        ("default: TORCH_SDPA\ndefault: CUDNN_ATTN", "default"),
        (5, "5|int"),
        (["TORCH_SDPA"], "list|TORCH_SDPA"),
    ],
    ids=["key", "nested key", "empty name", "twice", "number", "list"],
)
def test_what_is_no_config(door: Door, config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        door(config)


# --- the environment

ENVIRONMENTS = {
    "no name": {"OMNI_ATTN_BACKEND": "two words"},
    "no name in the other": {"DIFFUSION_ATTENTION_BACKEND": "tab\tname"},
    "unregistered": {"OMNI_ATTN_BACKEND": "NO_SUCH_ATTN"},
    "two answers": {"OMNI_ATTN_BACKEND": "CUDNN_ATTN", "DIFFUSION_ATTENTION_BACKEND": "FLASH_ATTN"},
    "a good name": {"OMNI_ATTN_BACKEND": "CUDNN_ATTN"},
}
each_environment = pytest.mark.parametrize("variables", ENVIRONMENTS.values(), ids=ENVIRONMENTS)


def put(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@each_door
@each_environment
@pytest.mark.parametrize("config", DEFAULTS.values(), ids=DEFAULTS)
def test_an_explicit_default_does_not_look_at_it(
    door: Door, config: Any, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, variables)
    assert door(config) == ("TORCH_SDPA", "default")


@each_environment
def test_neither_does_a_ready_made_config(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, variables)
    assert by_layer(ROLES["object"]) == by_select(ROLES["object"]) == ("TORCH_SDPA", "per_role['self']")
    for door in (by_layer, by_scope, by_select):
        assert door(AttentionConfig())[1] == "platform default"


@pytest.mark.parametrize("variables", [ENVIRONMENTS["no name"], ENVIRONMENTS["two answers"]], ids=str)
def test_where_nothing_was_chosen_its_fault_is_told(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, variables)
    with pytest.raises(ConfigError, match="OMNI_ATTN_BACKEND"):
        Attention(2, 64, role="self")
