"""get_attn_backend_for_role: the class, and the person's spec or None, in its old and its new form."""

from __future__ import annotations

from typing import Any

import pytest

from omni_attn.backends.torch_sdpa import TorchSDPABackend
from omni_attn.config import AttentionConfig, AttentionSpec
from omni_attn.errors import BackendRejectedError
from omni_attn.selector import get_attn_backend_for_role, select, use_attention_config
from omni_attn.testing import fake_device
from tests.selection.stubs import ask, choose

H100 = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"}, cudnn=91900)
B200 = fake_device("sm_100", cudnn=91900)
CPU = fake_device("cpu")
SDPA = AttentionSpec(backend="TORCH_SDPA")


def test_class_and_spec() -> None:
    config = AttentionConfig(per_role={"cross": SDPA})
    answer = get_attn_backend_for_role(
        "cross.image", 128, config=config, role_category="cross", platform=H100
    )
    assert answer == (TorchSDPABackend, SDPA)
    assert get_attn_backend_for_role("self", 128, config=config, platform=CPU) == (TorchSDPABackend, None)
    by_request = get_attn_backend_for_role(config=config, platform=CPU, request=ask("cross"))
    assert by_request == (TorchSDPABackend, SDPA)


@pytest.mark.parametrize(("promise", "backend"), [(False, "CUDNN_ATTN"), (True, "FLASH_ATTN")])
def test_the_trtllm_flag_is_the_promise_of_no_masks(promise: bool, backend: str) -> None:
    cls, spec = get_attn_backend_for_role("self", 128, platform=H100, allow_trtllm_default=promise)
    assert (cls.get_name(), spec) == (backend, None)
    request = ask(num_heads=None, dtype=None, mask_usage="never" if promise else None)
    assert cls is select(request, None, H100).backend_cls


def test_the_config_and_the_machine_in_force() -> None:
    with use_attention_config("CUDNN_ATTN", platform=H100):
        cls, spec = get_attn_backend_for_role("self", 128)
        assert cls.get_name() == "CUDNN_ATTN" and spec == AttentionSpec(backend="CUDNN_ATTN")
        assert get_attn_backend_for_role("self", 128, config=choose("SDPA")) == (TorchSDPABackend, SDPA)
        with pytest.raises(BackendRejectedError, match="cpu"):
            get_attn_backend_for_role("self", 128, platform=CPU)


@pytest.mark.parametrize(
    "arguments",
    [
        {"role": "self", "request": ask()},
        {"head_size": 128, "request": ask()},
        {"role_category": "self", "request": ask()},
        {"allow_trtllm_default": True, "request": ask()},
        {"role": "self"},
        {"head_size": 128},
        {},
    ],
    ids=lambda arguments: "+".join(arguments) or "nothing",
)
def test_request_and_its_parts_exclude_each_other(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="request"):
        get_attn_backend_for_role(platform=CPU, **arguments)


def test_an_unknown_head_size_is_no_reason() -> None:
    cls, _ = get_attn_backend_for_role("self", -1, platform=B200)
    assert cls.get_name() == "CUDNN_ATTN"


def test_refusals_and_unknown_names_are_the_selectors_own() -> None:
    for config in (choose("FLASH_ATTN"), choose("nope")):
        with pytest.raises(ValueError) as by_select:
            select(ask(num_heads=None, dtype=None, mask_usage=None), config, CPU)
        with pytest.raises(ValueError) as by_role:
            get_attn_backend_for_role("self", 128, config=config, platform=CPU)
        assert (by_role.type, str(by_role.value)) == (by_select.type, str(by_select.value))
