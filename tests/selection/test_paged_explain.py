"""What explain tells of a layer over a paged KV cache: the cache, and what the chosen kernel takes of one."""

from __future__ import annotations

import json

from omni_attn.config import AttentionConfig
from omni_attn.explain import RoleExplanation, explain_request
from omni_attn.facts import AttentionRequest, FullAttentionSpec
from omni_attn.platforms import current_omni_platform
from omni_attn.testing import fake_device

PACKAGES = {"tokenspeed-fa3": "3.0.0", "flashinfer-python": "0.6.18", "triton": "3.6.0"}


def explained(choice: str | None = None, block_size: int = 1560, head_size: int = 128) -> RoleExplanation:
    cache = FullAttentionSpec(block_size=block_size, num_kv_heads=12, head_size=head_size, dtype="bfloat16")
    request = AttentionRequest(
        role="self", num_heads=12, head_size=head_size, dtype="bfloat16", kv_cache=cache
    )
    config = AttentionConfig.model_validate({} if choice is None else {"default": choice})
    return explain_request(request, config, current_omni_platform(fake_device("sm_90", packages=PACKAGES)))


def test_the_cache_and_what_the_kernel_takes_of_it() -> None:
    assert explained().cache_line == (
        'role "self" keeps bfloat16 in pages of 1560 tokens (full); FLASH_ATTN takes page sizes any up to 63, layouts '
        "NHD or HND, CUDA graphs ALWAYS"
    )
    planned = explained("FLASHINFER_ATTN").cache_line
    assert planned is not None and planned.endswith("plans each step from lengths on the host")


def test_as_plain_data() -> None:
    told = explained().to_dict()
    assert told["kv_cache"] == {
        "kind": "full",
        "dtype": "bfloat16",
        "block_size": 1560,
        "kernel_block_sizes": ["any up to 63"],
        "layouts": ["NHD", "HND"],
        "cudagraph": "ALWAYS",
    }
    assert json.loads(json.dumps(told)) == told


def test_a_refused_choice_tells_the_cache_alone() -> None:
    refused = explained("FLASHINFER_ATTN", head_size=72)
    assert refused.refusal is not None and refused.cache_line is None
    assert refused.to_dict()["kv_cache"] == {"kind": "full", "dtype": "bfloat16", "block_size": 1560}


def test_without_a_cache_there_is_nothing_to_tell() -> None:
    request = AttentionRequest(role="self", num_heads=12, head_size=128)
    told = explain_request(request, AttentionConfig(), current_omni_platform(fake_device("cpu")))
    assert told.cache_line is None and "kv_cache" not in told.to_dict()
