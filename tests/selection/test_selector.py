"""What select and get_attn_backend_for_role answer, and what they say when they cannot."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from omni_attn.backends.registry import registered_names
from omni_attn.config import AttentionConfig, AttentionSpec, load_config
from omni_attn.errors import BackendRejectedError, ConfigError, NoBackendError
from omni_attn.facts import AttentionRequest
from omni_attn.layer import Attention
from omni_attn.platforms import CudaPlatform, current_omni_platform
from omni_attn.selector import select, use_attention_config
from omni_attn.testing import fake_device
from tests.selection.stubs import HERE, ask, choose, registered

H100 = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"}, cudnn=91900)
BARE_H100 = fake_device("sm_90")
B200 = fake_device("sm_100", cudnn=91900)
CPU = fake_device("cpu")


@pytest.mark.parametrize(
    ("config", "role", "category", "backend", "source"),
    [
        (
            {"per_role": {"self": "CUDNN_ATTN"}, "default": "SDPA"},
            "self",
            "x",
            "CUDNN_ATTN",
            "per_role['self']",
        ),
        (
            {"per_role": {"cross": "CUDNN_ATTN"}, "default": "SDPA"},
            "cross.image",
            "cross",
            "CUDNN_ATTN",
            "per_role['cross'] (role_category)",
        ),
        (
            {"per_role": {"cross": "CUDNN_ATTN"}, "default": "SDPA"},
            "cross.image",
            None,
            "TORCH_SDPA",
            "default",
        ),
        ({"per_role": {"Self": "CUDNN_ATTN"}}, "self", "self", "FLASH_ATTN", "platform default"),
        ({"default": "SDPA"}, "self", "self", "TORCH_SDPA", "default"),
        ({}, "self", "self", "FLASH_ATTN", "platform default"),
    ],
)
def test_precedence_and_source(
    config: dict[str, Any], role: str, category: str | None, backend: str, source: str
) -> None:
    selection = select(ask(role, role_category=category), choose(config), H100)
    assert (selection.backend, selection.source) == (backend, source)


def test_fields_of_a_choice() -> None:
    config = choose({"default": {"backend": "flash_attn", "variant": "fa3"}})
    selection = select(ask(), config, current_omni_platform(H100))
    assert selection.class_path == f"{selection.backend_cls.__module__}.{selection.backend_cls.__qualname__}"
    assert selection.backend_cls.get_name() == selection.backend == "FLASH_ATTN"
    assert (selection.variant, selection.spec) == ("fa3", AttentionSpec(backend="FLASH_ATTN", variant="fa3"))
    assert [verdict.accepted for verdict in selection.verdicts] == [True]
    with pytest.raises(AttributeError):
        selection.variant = "fa2"  # type: ignore[misc]


def test_a_default_has_no_spec_and_a_verdict_on_every_candidate() -> None:
    selection = select(ask(dtype="float32"), None, H100)
    assert selection.spec is None and selection.backend == "TORCH_SDPA"
    assert [(v.backend, v.accepted) for v in selection.verdicts] == [
        ("CUDNN_ATTN", False),
        ("FLASH_ATTN", False),
        ("TORCH_SDPA", True),
    ]
    for verdict in selection.verdicts[:2]:
        assert all("needs" in reason and "found" in reason for reason in verdict.reasons)


def test_explain_names_role_choice_source_and_every_verdict() -> None:
    text = select(ask("cross", dtype="float32"), None, H100).explain()
    first, *rest = text.splitlines()
    assert '"cross"' in first and "TORCH_SDPA" in first and "platform default" in first
    assert [line.split(":")[0].strip() for line in rest] == ["CUDNN_ATTN", "FLASH_ATTN", "TORCH_SDPA"]
    assert "float32" in rest[0] and "float32" in rest[1] and "accepted" in rest[2]


@pytest.mark.parametrize(
    ("config", "source"),
    [
        ({"default": "FLASH_ATTN"}, "default"),
        ({"per_role": {"cross.image": "FLASH_ATTN"}}, "per_role['cross.image']"),
        ({"per_role": {"cross": "FLASH_ATTN"}}, "per_role['cross'] (role_category)"),
    ],
)
def test_a_refusal_says_everything_and_its_line_works(config: dict[str, Any], source: str) -> None:
    request = ask("cross.image", role_category="cross")
    with pytest.raises(BackendRejectedError) as caught:
        select(request, choose(config), B200)
    text = str(caught.value)
    for part in ('"cross.image"', "FLASH_ATTN", source, "sm_100", "10.0", "CUDNN_ATTN", "TORCH_SDPA"):
        assert part in text
    pasted = re.search(r"`(per_role: .*?)`", text)
    assert pasted, text
    line = load_config(pasted[1], environ={})
    assert list(line.per_role) == ["cross.image"]
    mended = AttentionConfig(
        default=choose(config).default, per_role={**choose(config).per_role, **line.per_role}
    )
    selection = select(request, mended, B200)
    assert (selection.backend, selection.source) == ("CUDNN_ATTN", "per_role['cross.image']")


def test_a_refused_environment_choice_names_the_variable() -> None:
    config = load_config({}, environ={"OMNI_ATTN_BACKEND": "FLASH_ATTN"})
    with pytest.raises(BackendRejectedError, match="env OMNI_ATTN_BACKEND"):
        select(ask(), config, CPU)


def test_no_candidate_at_all_shows_every_verdict() -> None:
    with pytest.raises(NoBackendError) as caught:
        select(ask("odd", dtype="int8"), None, H100)
    text = str(caught.value)
    assert all(part in text for part in ('"odd"', "sm_90", "FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA", "int8"))


def test_reasons_of_one_refusal_come_together() -> None:
    request = ask(dtype="float32", head_size=264, mask_usage="arbitrary")
    with pytest.raises(BackendRejectedError) as caught:
        select(request, choose("FLASH_ATTN"), BARE_H100)
    assert all(part in str(caught.value) for part in ("fa3-fwd", "float32", "head_size=264", "attn_mask"))


class BanningPlatform(CudaPlatform):
    """A device family on which one kernel is known to be wrong."""

    bans: ClassVar[Mapping[str, str]] = {"FLASH_ATTN": "wrong results, upstream report 12"}


def test_a_ban_is_a_reason_for_defaults_and_choices_alike() -> None:
    selection = select(ask(max_seqlen_k=32760), None, BanningPlatform(H100))
    assert selection.backend == "CUDNN_ATTN" and "upstream report 12" in selection.explain()
    with pytest.raises(BackendRejectedError, match="upstream report 12"):
        select(ask(), choose("FLASH_ATTN"), BanningPlatform(H100))
    assert select(ask(max_seqlen_k=32760), None, H100).backend == "FLASH_ATTN"


# --- names


@pytest.mark.parametrize(
    ("name", "near"),
    [("FLASH_ATTM", "FLASH_ATTN"), ("torch_spda", "TORCH_SDPA"), ("CUDNNATTN", "CUDNN_ATTN"), ("nope", None)],
)
@pytest.mark.parametrize("as_fallback", [False, True])
def test_unknown_names_are_legal_until_selection(name: str, near: str | None, as_fallback: bool) -> None:
    spec = {"backend": "FLASH_ATTN", "fallback": [name]} if as_fallback else name
    config = choose({"per_role": {"self": spec}})
    assert select(ask("cross"), config, CPU).backend == "TORCH_SDPA"
    with pytest.raises(ConfigError) as caught:
        select(ask("self"), config, CPU)
    text = str(caught.value)
    assert name.upper() in text and all(known in text for known in registered_names())
    assert near is None or f"mean {near}" in text or f"mean '{near}'" in text


@pytest.mark.parametrize("spelling", ["TORCH_SDPA", "torch_sdpa", "Sdpa", "SDPA"])
def test_any_case_and_aliases(spelling: str) -> None:
    assert select(ask(), choose(spelling), H100).backend == "TORCH_SDPA"


# --- start-up log


def test_one_line_per_role_source_and_backend(caplog: pytest.LogCaptureFixture) -> None:
    def build(config: object, role: str) -> None:
        with use_attention_config(choose(config), platform=CPU):
            Attention(2, 8, role=role)

    with registered(("PLAIN_TEST", f"{HERE}:PlainBackend")), caplog.at_level(logging.INFO, "omni_attn"):
        for config in ({}, {}, {"default": "SDPA"}, {"default": "PLAIN_TEST"}, {"default": "SDPA"}):
            build(config, "logged.a")
        build({}, "logged.b")
    lines = [r.getMessage() for r in caplog.records if "logged." in r.getMessage()]
    expected = [
        ("logged.a", "TORCH_SDPA", "platform default"),
        ("logged.a", "TORCH_SDPA", "default"),
        ("logged.a", "PLAIN_TEST", "default"),
        ("logged.b", "TORCH_SDPA", "platform default"),
    ]
    assert len(lines) == len(expected)
    for line, words in zip(lines, expected, strict=True):
        assert all(word in line for word in words), line


def test_requests_are_judged_by_what_they_state() -> None:
    unstated = AttentionRequest(role="self", num_heads=4, head_size=128)
    assert select(unstated, choose("FLASH_ATTN"), H100).variant == "fa3"
    assert select(unstated, None, H100).backend == "CUDNN_ATTN"
