"""The environment supplies `default` only where the config has none, and the config remembers that it did."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest

from omni_attn.config import AttentionConfig, AttentionSpec, load_config, load_pipeline
from omni_attn.errors import ConfigError

OURS, COMPATIBLE = "OMNI_ATTN_BACKEND", "DIFFUSION_ATTENTION_BACKEND"
SDPA = AttentionSpec(backend="TORCH_SDPA")


@pytest.mark.parametrize("variable", [OURS, COMPATIBLE])
def test_the_variable_is_a_choice_with_its_own_label(variable: str) -> None:
    config = load_config({"per_role": {"cross": "CUDNN"}}, environ={variable: "sdpa"})
    assert config.resolve("self") == (SDPA, f"env {variable}")
    assert config.resolve("cross")[1] == "per_role['cross']"


def test_both_variables_may_name_the_same_backend() -> None:
    config = AttentionConfig().with_environment({OURS: "sdpa", COMPATIBLE: "TORCH_SDPA"})
    assert config.resolve("self") == (SDPA, f"env {OURS}")


def test_different_backends_are_an_error() -> None:
    with pytest.raises(ConfigError, match=f"{OURS}=TORCH_SDPA and {COMPATIBLE}=CUDNN_ATTN"):
        AttentionConfig().with_environment({OURS: "SDPA", COMPATIBLE: "CUDNN"})


def test_an_explicit_default_ignores_the_environment() -> None:
    config = AttentionConfig.model_validate({"default": "CUDNN"})
    environ = {OURS: "not a name", COMPATIBLE: "SDPA", "VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}
    assert config.with_environment(environ) is config
    assert config.resolve("self")[1] == "default"


@pytest.mark.parametrize("text", ["", "  ", "auto", "AUTO"])
def test_empty_and_auto_are_not_set(text: str) -> None:
    config = AttentionConfig()
    assert config.with_environment({OURS: text}) is config
    assert config.with_environment({OURS: text, COMPATIBLE: "SDPA"}).resolve("self")[1] == f"env {COMPATIBLE}"


def test_an_unregistered_name_is_legal_and_two_words_are_not() -> None:
    spec, _ = AttentionConfig().with_environment({OURS: "nope"}).resolve("self")
    assert spec == AttentionSpec(backend="NOPE")
    with pytest.raises(ConfigError, match=f"{OURS}: a backend name is one word"):
        AttentionConfig().with_environment({OURS: "FLASH ATTN"})


def test_an_explicit_auto_leaves_the_default_to_the_environment() -> None:
    assert load_config({"default": "auto"}, environ={OURS: "SDPA"}).resolve("self")[1] == f"env {OURS}"


@pytest.mark.parametrize(
    "variable", ["VLLM_ATTENTION_BACKEND", "FASTVIDEO_ATTENTION_BACKEND", "DIFFUSION_ATTENTION_QUANT"]
)
def test_variables_of_other_projects_are_named_in_a_warning(variable: str) -> None:
    with pytest.warns(UserWarning, match=f"{variable} is not read"):
        assert load_config({}, environ={variable: "TORCH_SDPA"}) == AttentionConfig()


def test_provenance_counts_for_equality_but_is_not_dumped() -> None:
    given = AttentionConfig(default=SDPA)
    supplied = AttentionConfig().with_environment({OURS: "SDPA"})
    assert supplied != given
    assert hash(supplied) != hash(given)
    assert supplied != AttentionConfig().with_environment({COMPATIBLE: "SDPA"})
    assert supplied == AttentionConfig().with_environment({OURS: "torch_sdpa"})
    assert supplied.model_dump() == given.model_dump()
    assert AttentionConfig.model_validate(supplied.model_dump()) == given


def test_provenance_survives_copies_until_the_default_changes() -> None:
    supplied = AttentionConfig().with_environment({OURS: "SDPA"})
    for twin in (
        supplied.model_copy(),
        supplied.model_copy(deep=True),
        copy.deepcopy(supplied),
        pickle.loads(pickle.dumps(supplied)),
        AttentionConfig.model_validate(supplied),
    ):
        assert twin == supplied
        assert hash(twin) == hash(supplied)
        assert twin.resolve("self")[1] == f"env {OURS}"
    assert supplied.model_copy(update={"default": SDPA}).resolve("self")[1] == "default"
    assert supplied.resolve("self")[1] == f"env {OURS}"


def test_loading_reads_the_process_environment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OURS, "SDPA")
    monkeypatch.delenv(COMPATIBLE, raising=False)
    assert load_config({}).resolve("self")[1] == f"env {OURS}"
    pipeline = load_pipeline({"pipeline": "wan", "model": "wan-tiny"})
    monkeypatch.setenv(OURS, "CUDNN")
    assert pipeline.attention.resolve("self") == (SDPA, f"env {OURS}")
    assert load_config(pipeline.attention) is pipeline.attention


def test_no_variable_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AttentionConfig().with_environment({"PATH": "/bin"}) == AttentionConfig()
