"""Accepted forms of a config agree, round trips are exact, and resolution follows one order."""

from __future__ import annotations

import copy
import json
import pickle
import re
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from omni_attn.config import AttentionConfig, AttentionSpec, load_config

words = st.sampled_from(
    ["self", "cross", "image", "ltx2", "on", "no", "null", "yes", "default", "per_role", "e3"]
)
roles = st.lists(words, min_size=1, max_size=3).map(".".join)
fractions = st.floats(0, 1) | st.sampled_from([0, 1, 5e-3])
# PyYAML writes a text like 5e-3, -.5 or 0o17 bare, and a configuration reads numbers, so such texts do not round-trip.
texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=6).filter(
    lambda text: not re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]+|[-+]\.[0-9]+|0o[0-7]+", text)
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
specs: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"backend": st.sampled_from(["sdpa", "TORCH_SDPA", "Cudnn_Attn", "PLUGIN"])}),
    st.fixed_dictionaries(
        {"backend": st.just("FLASH_ATTN")},
        optional={"variant": st.sampled_from(["fa2", "FA3", "auto"]), "fallback": st.just(["SDPA", "CUDNN"])},
    ),
    st.fixed_dictionaries(
        {"backend": st.just("vsa")},
        optional={
            "fastvideo_vsa": st.one_of(
                st.fixed_dictionaries({"topk": st.integers(1, 99)}, optional={"provider": st.just("flex")}),
                st.fixed_dictionaries({"sparsity": fractions}, optional={"coarse_weight": st.just("one")}),
            )
        },
    ),
    st.builds(lambda topk: {"backend": "FASTVIDEO_VSA", "fastvideo_vsa_topk": topk}, st.integers(1, 999)),
    st.builds(
        lambda dtype, target: {
            "backend": "TRTLLM",
            "quant": {"dtype_qk": dtype, "flashinfer_backend": "ragged"},
            "skip_softmax": {"target_sparsity": target},
        },
        st.sampled_from(["int8", "fp8_e4m3", None]),
        fractions,
    ),
    st.builds(
        lambda layers: {"backend": "RAINFUSION_ATTN", "block_sparse": {"skip_layers": layers}},
        st.lists(st.integers(0, 60), max_size=4) | st.just("0-2,38"),
    ),
    st.builds(
        lambda options: {"backend": "PLUGIN", "options": options}, st.dictionaries(texts, plain, max_size=2)
    ),
)
mappings = st.fixed_dictionaries(
    {}, optional={"default": specs | st.none(), "per_role": st.dictionaries(roles, specs, max_size=4)}
)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The tree form of a flat `per_role`, except for roles that are a prefix of another one."""
    tree: dict[str, Any] = {}
    for role, spec in flat.items():
        if any(
            other != role and (f"{other}.".startswith(f"{role}.") or f"{role}.".startswith(f"{other}."))
            for other in flat
        ):
            tree[role] = spec
            continue
        *parents, leaf = role.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = spec
    return tree  # fmt: skip


@given(mappings)
def test_all_forms_agree(mapping: dict[str, Any]) -> None:
    config = AttentionConfig.model_validate(mapping)
    tree = {**mapping, "per_role": nested(mapping.get("per_role", {}))}
    assert AttentionConfig.model_validate(tree) == config
    assert AttentionConfig.model_validate(MappingProxyType(mapping)) == config
    assert AttentionConfig.model_validate_json(json.dumps(tree)) == config
    for text in (
        json.dumps(tree, indent="\t"),
        yaml.safe_dump(tree),
        yaml.safe_dump(mapping, default_flow_style=True),
    ):
        assert load_config(text, environ={}) == config  # fmt: skip
    assert load_config(config, environ={}) is config


@given(mappings)
@example({"default": {"backend": "PLUGIN", "options": {"08": "010", "-09": ["0", "007"]}}})
def test_round_trips_are_exact(mapping: dict[str, Any]) -> None:
    config = AttentionConfig.model_validate(mapping)
    for unset in (False, True):
        dumps = [config.model_dump(mode=mode, exclude_unset=unset) for mode in ("python", "json")]
        for dump in dumps:
            loaded = AttentionConfig.model_validate(dump)
            assert loaded == config
            assert hash(loaded) == hash(config)
            assert loaded.model_dump(mode="json") == config.model_dump(mode="json")
        assert load_config(yaml.safe_dump(dumps[1]), environ={}) == config
        assert load_config(config.model_dump_json(exclude_unset=unset), environ={}) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


@given(mappings, roles, st.none() | roles)
def test_resolution_order(mapping: dict[str, Any], role: str, category: str | None) -> None:
    config = AttentionConfig.model_validate(mapping)
    spec, source = config.resolve(role, category)

    # The model: the first of three places that is filled.
    flat, default = mapping.get("per_role", {}), mapping.get("default")
    found = [flat[name] for name in (role, category) if name in flat] + [default] * (default is not None)
    assert spec == (AttentionSpec.model_validate(found[0]) if found else None)

    if role in flat:
        assert source == f"per_role['{role}']"
    elif category in flat:
        assert source == f"per_role['{category}'] (role_category)"
    else:
        assert source == (None if default is None else "default")


def test_a_dotted_role_inherits_nothing_from_its_prefix() -> None:
    config = AttentionConfig.model_validate({"per_role": {"ltx2": "SDPA", "cross": "CUDNN"}})
    assert config.resolve("ltx2.audio") == (None, None)
    assert config.resolve("LTX2") == (None, None)
    assert config.resolve("cross.image", "cross")[1] == "per_role['cross'] (role_category)"


def test_empty_config() -> None:
    for empty in (
        AttentionConfig(),
        *map(AttentionConfig.model_validate, ({}, {"default": None, "per_role": None})),
    ):
        assert empty.default is None
        assert empty.per_role == {}
        assert empty.resolve("self", "self") == (None, None)  # fmt: skip


@pytest.mark.parametrize("auto", ["auto", "AUTO", {"backend": "Auto"}, {"backend": "auto", "variant": None}])
def test_auto_means_not_set_here(auto: Any) -> None:
    config = AttentionConfig.model_validate({"default": auto, "per_role": {"self": auto, "cross": "sdpa"}})
    assert config == AttentionConfig.model_validate({"per_role": {"cross": "TORCH_SDPA"}})
    tree = {"per_role": {"a": {"b": {"backend": "auto"}}}}
    assert AttentionConfig.model_validate(tree) == AttentionConfig()


def test_dotted_keys_and_trees_stand_together() -> None:
    written = {
        "cross": "SDPA",
        "cross.image": "CUDNN",
        "ltx2": {"audio_self": {"backend": "VSA"}, "video.cross": {"backend": "SAGE"}},
    }
    config = AttentionConfig.model_validate({"per_role": written})
    assert {role: spec.backend for role, spec in config.per_role.items()} == {
        "cross": "TORCH_SDPA",
        "cross.image": "CUDNN_ATTN",
        "ltx2.audio_self": "FASTVIDEO_VSA",
        "ltx2.video.cross": "SAGE_ATTN",
    }


BAD_ROLES = [
    ({"self": {"backnd": "X"}}, ("self", "backnd"), "Did you mean 'backend'?"),
    ({"self": {"backend": "X", "backnd": "Y"}}, ("self", "backnd"), "Did you mean 'backend'?"),
    ({"a": {"b": {"backnd": "X"}}}, ("a", "b", "backnd"), "Did you mean 'backend'?"),
    ({"ltx2": {"backend": "X", "audio": {"backend": "Y"}}}, ("ltx2", "audio"), "unknown key. Valid keys"),
    ({"a": {"image": "SDPA"}}, ("a", "image"), "Write image: {backend: ...}"),
    ({"a": {"image": 3}}, ("a", "image"), "a mapping with `backend`, found 3"),
    ({"a": {"image": None}}, ("a", "image"), "a mapping with `backend`, found None"),
    ({"a": None}, ("a",), "a backend name or a mapping"),
    ({"a": ["SDPA"]}, ("a",), "a backend name or a mapping"),
    ({"a": {}}, ("a",), "an empty mapping chooses nothing"),
    ({"a": {"b": {}}}, ("a", "b"), "an empty mapping chooses nothing"),
    ({"a.b": "SDPA", "a": {"b": {"backend": "X"}}}, ("a", "b"), "given twice: here and at ['a.b']"),
    ({"a": {"b": {"backend": "X"}}, "a.b": "auto"}, ("a.b",), "given twice"),
    ({"backend": "SDPA"}, ("backend",), "a field of a spec and cannot name a role"),
    ({"quant": {"backend": "SDPA"}}, ("quant",), "a field of a spec and cannot name a role"),
    ({"cross.backend": "SDPA"}, ("cross.backend",), "a field of a spec and cannot name a role"),
    ({"a": {"b.fallback": {"backend": "X"}}}, ("a", "b.fallback"), "cannot name a role"),
    ({"": "SDPA"}, ("",), "words joined by dots"),
    ({"a..b": "SDPA"}, ("a..b",), "words joined by dots"),
    ({"a b": "SDPA"}, ("a b",), "words joined by dots"),
    ({"a": {"": {"backend": "X"}}}, ("a", ""), "words joined by dots"),
    ({3: "SDPA"}, (3,), "named by text, found 3"),
    ("SDPA", (), "maps roles to backends"),
    (["SDPA"], (), "maps roles to backends"),
]


@pytest.mark.parametrize(("per_role", "loc", "message"), BAD_ROLES, ids=lambda value: str(value)[:50])
def test_bad_role(per_role: Any, loc: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        AttentionConfig.model_validate({"per_role": per_role})
    (line,) = error.value.errors()
    assert line["loc"] == ("per_role", *loc)
    assert message in line["msg"]


def test_unknown_top_level_key() -> None:
    with pytest.raises(ValidationError, match=r"unknown key. Did you mean 'per_role'\?"):
        AttentionConfig.model_validate({"per_roles": {}})


def test_per_role_is_frozen() -> None:
    config = AttentionConfig.model_validate({"per_role": {"self": "SDPA"}})
    with pytest.raises(TypeError):
        config.per_role["self"] = AttentionSpec(backend="CUDNN")  # type: ignore[index]
    with pytest.raises(ValidationError, match="frozen"):
        config.default = AttentionSpec(backend="CUDNN")
