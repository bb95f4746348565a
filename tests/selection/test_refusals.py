"""What a refusal carries: data for programs, a text for people, and one line in the log for a default passed over."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from omni_attn.errors import (
    BackendImportError,
    BackendRejectedError,
    ConfigError,
    MetadataError,
    NoBackendError,
    OmniAttnError,
)
from omni_attn.facts import FullAttentionSpec, Verdict
from omni_attn.layer import Attention
from omni_attn.platforms import current_omni_platform
from omni_attn.selector import get_attn_backend_for_role, select, use_attention_config
from omni_attn.testing import fake_device, fake_kernels, fake_package
from tests.selection.stubs import ask, choose

CACHE = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")
CPU = fake_device("cpu")
H100 = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"}, cudnn=91900)
B200 = fake_device("sm_100", cudnn=91900)


# --- data


@pytest.mark.parametrize(
    ("config", "source"),
    [
        ("FLASH_ATTN", "default"),
        ({"per_role": {"cross.image": "FLASH_ATTN"}}, "per_role['cross.image']"),
        ({"per_role": {"cross": "FLASH_ATTN"}}, "per_role['cross'] (role_category)"),
    ],
    ids=["default", "role", "category"],
)
def test_a_refused_choice_says_what_was_asked_where_and_what_would_run(config: Any, source: str) -> None:
    with pytest.raises(BackendRejectedError) as caught:
        select(ask("cross.image", role_category="cross"), choose(config), B200)
    error = caught.value
    assert (error.role, error.backend, error.source) == ("cross.image", "FLASH_ATTN", source)
    assert error.alternatives == ("CUDNN_ATTN", "TORCH_SDPA")
    assert isinstance(error.reasons, tuple) and error.reasons
    assert all("needs" in reason and reason in str(error) for reason in error.reasons)


def test_alternatives_are_empty_where_nothing_would_run() -> None:
    with pytest.raises(BackendRejectedError) as caught:
        select(ask(dtype="int8"), choose("TORCH_SDPA"), CPU)
    assert caught.value.alternatives == () and any("int8" in reason for reason in caught.value.reasons)


def test_no_candidate_carries_every_verdict() -> None:
    request = ask(dtype="int8")
    with pytest.raises(NoBackendError) as caught:
        select(request, None, H100)
    verdicts = caught.value.verdicts
    assert verdicts == current_omni_platform(H100).evaluate(None, request)
    assert {v.backend for v in verdicts if isinstance(v, Verdict)} == {
        "FLASH_ATTN",
        "CUDNN_ATTN",
        "TORCH_SDPA",
    }
    assert all(str(verdict) in str(caught.value) for verdict in verdicts)


def refused(config: object, device: Any = CPU, **needs: Any) -> OmniAttnError:
    with pytest.raises(OmniAttnError) as caught:
        select(ask(**needs), choose(config), device)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        refused("FLASH_ATTN"),
        refused({}, dtype="int8"),
        refused("NO_SUCH_ATTN"),
        ConfigError("first problem", "second problem"),
        BackendImportError("broken"),
        MetadataError("does not fit"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_the_way_between_processes(error: OmniAttnError) -> None:
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error) and str(twin) == str(error) and vars(twin) == vars(error)


# --- texts


@pytest.mark.parametrize(
    ("config", "source"),
    [
        ({"default": "FLASH_ATN"}, "default"),
        ({"per_role": {"self": "FLASH_ATN"}}, "per_role['self']"),
        ({"default": {"backend": "CUDNN_ATTN", "fallback": ["FLASH_ATN"]}}, "default"),
    ],
    ids=["default", "role", "fallback"],
)
@pytest.mark.parametrize(
    "door",
    [
        lambda config: select(ask(), choose(config), CPU),
        lambda config: Attention(2, 8, role="self", config=config),
        lambda config: get_attn_backend_for_role("self", 8, config=config, platform=CPU),
    ],
    ids=["select", "layer", "role"],
)
def test_an_unregistered_name_comes_with_role_and_source(
    config: Any, source: str, door: Callable[[Any], object]
) -> None:
    with use_attention_config(None, platform=CPU), pytest.raises(ConfigError) as caught:
        door(config)
    for part in ('"self"', "FLASH_ATN", source, "Did you mean FLASH_ATTN", "TORCH_SDPA"):
        assert part in str(caught.value)


def test_an_unregistered_name_of_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "FLASH_ATN")
    with pytest.raises(ConfigError, match=r'"self".*FLASH_ATN.*env DIFFUSION_ATTENTION_BACKEND'):
        Attention(2, 8, role="self")


# --- a paged KV cache


def test_a_backend_without_pages_is_refused_to_a_layer_with_a_kv_cache() -> None:
    with pytest.raises(BackendRejectedError, match="needs a paged KV cache, found"):
        select(ask(num_heads=2, head_size=8, kv_cache=CACHE), choose("CUDNN_ATTN"), H100)


def test_a_backend_over_pages_alone_is_refused_to_a_layer_without() -> None:
    with pytest.raises(BackendRejectedError, match="needs stateless attention, found"):
        select(ask(num_heads=2, head_size=8), choose("TRITON_ATTN"), H100)


def test_a_choice_among_variants_says_it_too() -> None:
    with pytest.raises(BackendRejectedError, match="paged KV cache"):
        select(ask(num_heads=2, head_size=8, kv_cache=CACHE), choose("SAGE_ATTN"), H100)


# --- the log


def test_a_broken_default_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    broken = fake_package("fa3_fwd_interface", raises=OSError("libkernel.so: cannot open"))
    with (
        caplog.at_level(logging.INFO, "omni_attn"),
        broken,
        fake_kernels("CUDNN_ATTN"),
        use_attention_config(None, platform=H100, dtype="bfloat16"),
    ):
        layers = [Attention(2, 64, role="broken_default", mask_usage="never") for _ in range(3)]
    assert {layer.selection and layer.selection.backend for layer in layers} == {"CUDNN_ATTN"}
    lines = [record for record in caplog.records if "broken_default" in record.getMessage()]
    warnings = [record.getMessage() for record in lines if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and len(lines) == 2  # and the start-up line of the one that runs
    for part in ("FLASH_ATTN (fa3)", "libkernel.so: cannot open", "passed over"):
        assert part in warnings[0]
