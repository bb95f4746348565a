"""The open registry: names, classes and paths."""

from __future__ import annotations

from typing import Any

import pytest

from omni_attn.backends.abstract import AttentionBackend
from omni_attn.backends.registry import (
    DiffusionAttentionBackendEnum,
    load_backend,
    register_diffusion_backend,
    registered_names,
    unregister_diffusion_backend,
)
from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.config import AttentionSpec
from omni_attn.config.names import ALIASES, KNOWN_NAMES, OPTION_OWNERS
from omni_attn.errors import BackendRejectedError, ConfigError
from omni_attn.layer import Attention
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device
from tests.selection.stubs import HERE, OwnSDPABackend, PlainBackend, PlainTwin, ask, choose, registered

CPU = fake_device("cpu")
BUILT_IN = list(DiffusionAttentionBackendEnum)
TARGETS = [PlainBackend, f"{HERE}:PlainBackend", f"{HERE}.PlainBackend"]


def built_in_class(member: DiffusionAttentionBackendEnum) -> type[AttentionBackend]:
    return load_backend(member.value, member.name)


# --- built-in names


@pytest.mark.parametrize("member", BUILT_IN, ids=lambda member: member.name)
def test_key_name_and_yaml_word_are_one(member: DiffusionAttentionBackendEnum) -> None:
    backend = built_in_class(member)
    assert (
        backend.get_name() == member.name and member.name in KNOWN_NAMES and member.name in registered_names()
    )
    assert AttentionSpec(backend=member).backend == member.name  # type: ignore[arg-type]
    assert f"{backend.__module__}.{backend.__qualname__}" == member.value


@pytest.mark.parametrize("spelling", ["TORCH_SDPA", "torch_sdpa", "Sdpa"])
def test_the_enum_is_asked_in_any_case_and_by_alias(spelling: str) -> None:
    assert DiffusionAttentionBackendEnum[spelling] is DiffusionAttentionBackendEnum.TORCH_SDPA


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nope", ["NOPE"]),
        ("TORCH_SPDA", ["TORCH_SPDA", "mean TORCH_SDPA"]),
        ("", ["backend"]),
        ("two words", ["two words"]),
        (5, ["5"]),
    ],
    ids=str,
)
def test_an_unknown_name_asked_of_the_enum(name: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        DiffusionAttentionBackendEnum[name]
    assert all(part in str(caught.value) for part in words)


def test_values_are_unique_and_aliases_lead_to_known_names() -> None:
    assert len({member.value for member in BUILT_IN}) == len(DiffusionAttentionBackendEnum.__members__)
    assert set(ALIASES.values()) <= set(KNOWN_NAMES) and not set(ALIASES) & set(KNOWN_NAMES)


@pytest.mark.parametrize("member", BUILT_IN, ids=lambda member: member.name)
def test_facts_own_exactly_the_options_of_the_table(member: DiffusionAttentionBackendEnum) -> None:
    """`fastvideo_vsa_topk` is a spelling of `fastvideo_vsa`, which facts may leave out."""
    owned = {option for option, owners in OPTION_OWNERS.items() if member.name in owners}
    facts = built_in_class(member).facts
    assert facts.option_fields - {"fastvideo_vsa_topk"} == owned - {"fastvideo_vsa_topk"}
    assert facts.option_fields <= set(AttentionSpec.model_fields)


@pytest.mark.parametrize("member", BUILT_IN, ids=lambda member: member.name)
def test_what_needs_a_package_says_how_to_get_it(member: DiffusionAttentionBackendEnum) -> None:
    facts = built_in_class(member).facts
    kernels = [facts, *(variant.facts for variant in facts.variants)]
    packages = [package for kernel in kernels for package in kernel.packages]
    assert all(package.install_command and package.symbols and package.module for package in packages)
    assert facts.summary and facts.numerics in ("exact", "quantised", "approximate")
    # What a selection of blocks loses is the input's own; with all of them such a kernel is held to be exact.
    assert facts.numerics == "exact" or facts.error or facts.selects_blocks


# --- registration


@pytest.mark.parametrize("target", TARGETS, ids=["class", "module:Class", "module.Class"])
def test_a_new_name(target: str | type[AttentionBackend]) -> None:
    assert "PLAIN_TEST" not in registered_names()
    with registered(("plain_test", target)):
        assert "PLAIN_TEST" in registered_names()
        selection = select(ask(), choose("Plain_Test"), CPU)
        assert selection.backend_cls is PlainBackend and selection.class_path == f"{HERE}.PlainBackend"
    with pytest.raises(ConfigError, match="PLAIN_TEST"):
        select(ask(), choose("PLAIN_TEST"), CPU)


def test_a_replacement_takes_effect_at_once_and_ends_with_its_registration() -> None:
    config, seen = choose("PLAIN_TEST"), []
    with registered(("PLAIN_TEST", PlainBackend)):
        seen.append(select(ask(), config, CPU).backend_cls)
        with registered(("TORCH_SDPA", f"{HERE}:OwnSDPABackend")):
            seen.append(select(ask(), None, CPU).backend_cls)
            seen.append(select(ask(), choose("SDPA"), CPU).backend_cls)
        seen.append(select(ask(), None, CPU).backend_cls)
        register_diffusion_backend("PLAIN_TEST", PlainTwin)
        seen.append(select(ask(), config, CPU).backend_cls)
        with pytest.raises(BackendRejectedError, match="head_size=80"):
            select(ask(head_size=80), config, CPU)
    assert seen == [PlainBackend, OwnSDPABackend, OwnSDPABackend, TorchSDPABackend, PlainTwin]


def test_a_layer_keeps_what_it_was_built_with() -> None:
    with use_attention_config(None, platform=CPU):
        layer = Attention(2, 8, role="self")
        with registered(("TORCH_SDPA", OwnSDPABackend)):
            assert layer.selection is not None and layer.selection.backend_cls is TorchSDPABackend
            newer = Attention(2, 8, role="self").selection
            assert newer is not None and newer.backend_cls is OwnSDPABackend


def test_an_enum_member_and_an_alias_name_the_same_entry() -> None:
    for name in (DiffusionAttentionBackendEnum.TORCH_SDPA, "sdpa"):
        register_diffusion_backend(name, OwnSDPABackend)
        try:
            assert select(ask(), None, CPU).backend_cls is OwnSDPABackend
        finally:
            unregister_diffusion_backend("TORCH_SDPA")


def make_backend(name: str) -> type[AttentionBackend]:
    """Classes that a function or a notebook cell makes share module and qualified name."""

    class Made(PlainBackend):
        @staticmethod
        def get_name() -> str:
            return name

    return Made


def test_classes_of_one_factory_stay_apart() -> None:
    first, second = make_backend("MADE_A"), make_backend("MADE_B")
    with registered(("MADE_A", first)):
        with registered(("MADE_B", second)):
            assert select(ask(), choose("MADE_B"), CPU).backend_cls is second
            assert select(ask(), choose("MADE_A"), CPU).backend_cls is first
        assert select(ask(), choose("MADE_A"), CPU).backend_cls is first


def test_a_redefined_class_replaces_its_older_self() -> None:
    older, newer = make_backend("MADE_A"), make_backend("MADE_A")
    with registered(("MADE_A", older)):
        assert select(ask(), choose("MADE_A"), CPU).backend_cls is older
        register_diffusion_backend("MADE_A", newer)
        assert select(ask(), choose("MADE_A"), CPU).backend_cls is newer


# --- refusals


@pytest.mark.parametrize("name", ["", "two words", "tab\tname"])
def test_bad_names(name: str) -> None:
    with pytest.raises(ConfigError, match="backend name"):
        register_diffusion_backend(name, PlainBackend)


def test_another_get_name_is_refused_by_class_at_once_and_by_path_at_selection() -> None:
    with pytest.raises(ConfigError, match=r"OTHER_TEST.*PLAIN_TEST"):
        register_diffusion_backend("OTHER_TEST", PlainBackend)
    assert "OTHER_TEST" not in registered_names()
    by_path = registered(("OTHER_TEST", f"{HERE}:PlainBackend"))
    with by_path, pytest.raises(ConfigError, match=r"OTHER_TEST.*PLAIN_TEST"):
        select(ask(), choose("OTHER_TEST"), CPU)


def test_what_is_no_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="AttentionBackend"):
        register_diffusion_backend("PLAIN_TEST", dict)  # type: ignore[arg-type]
    by_path = registered(("PLAIN_TEST", f"{HERE}:ReferenceImpl"))
    with by_path, pytest.raises(ConfigError, match="AttentionBackend"):
        select(ask(), choose("PLAIN_TEST"), CPU)


def test_a_path_that_leads_nowhere() -> None:
    with registered(("PLAIN_TEST", "no_such_module:Backend")), pytest.raises(BackendRejectedError) as caught:
        select(ask(), choose("PLAIN_TEST"), CPU)
    assert "PLAIN_TEST" in str(caught.value) and "no_such_module" in str(caught.value)
    by_class = registered(("PLAIN_TEST", f"{HERE}:NoSuchClass"))
    with by_class, pytest.raises(ConfigError, match="NoSuchClass"):
        select(ask(), choose("PLAIN_TEST"), CPU)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("no_such_module:Backend", "no_such_module"),
        (f"{HERE}:NoSuchClass", "NoSuchClass"),
        (f"{HERE}:PlainBackend", "PLAIN_TEST"),
        (f"{HERE}:ReferenceImpl", "AttentionBackend"),
    ],
    ids=["no module", "no class", "another name", "no backend"],
)
def test_a_broken_replacement_is_passed_over_by_defaults_alone(path: str, words: str) -> None:
    device = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"}, cudnn=91900)
    with registered(("FLASH_ATTN", path)):
        selection = select(ask(), None, device)
        with pytest.raises((ConfigError, BackendRejectedError), match=rf'"self".*FLASH_ATTN.*{words}'):
            select(ask(), choose("FLASH_ATTN"), device)
    assert selection.backend == "CUDNN_ATTN" and words in selection.explain()
