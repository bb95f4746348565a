"""What a layer holds of a step: the next call may differ in any tensor, and files hold nothing of it."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch

from omni_attn import (
    Attention,
    AttentionConfig,
    AttentionMetadata,
    load_config,
    prepare_attention,
    use_attention_config,
)
from omni_attn.errors import ConfigError, MetadataError
from omni_attn.facts import AttentionRequest, evaluate
from omni_attn.platforms import current_omni_platform
from omni_attn.testing import fake_device, fake_kernels
from tests.layer.stands import HEAD_SIZE, tensors

HOPPER = fake_device("sm_90", packages={"fa3-fwd": "0.0.3"}, cudnn=91900)


@pytest.mark.parametrize("which", [1, 2])
def test_a_key_or_value_of_another_dtype_does_not_reach_the_kernel(which: int) -> None:
    with fake_kernels("CUDNN_ATTN") as log, use_attention_config(load_config("CUDNN_ATTN"), platform=HOPPER):
        layer = Attention(4, HEAD_SIZE, role="self")
        call = [x.half() for x in tensors(1, 3, 4)]
        layer(*call)
        call[which] = call[which].bfloat16()
        with pytest.raises(MetadataError, match="one dtype"):
            layer(*call)
    assert len(log) == 1


def test_a_file_or_copy_holds_no_mask() -> None:
    with use_attention_config(AttentionConfig(), device="cpu"):
        layer = Attention(4, HEAD_SIZE, role="self")
    empty = len(pickle.dumps(layer))
    mask = torch.rand(1, 1, 256, 256) > 0.5
    layer(*tensors(1, 256, 256), AttentionMetadata(attn_mask=mask))
    assert len(pickle.dumps(layer)) < empty + 100 < mask.numel()
    again = copy.deepcopy(layer)
    torch.testing.assert_close(again(*tensors(1, 3, 4)), layer(*tensors(1, 3, 4)))


def test_a_fallback_is_logged_once_whatever_the_lengths(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config({"default": {"backend": "FLASH_ATTN", "fallback": ["TORCH_SDPA"]}})
    with fake_kernels("FLASH_ATTN"), use_attention_config(config, platform=HOPPER):
        layer = Attention(4, HEAD_SIZE, role="logged_once")
        with caplog.at_level(logging.WARNING, "omni_attn"):
            for length in (4, 5, 6):
                mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
                record = AttentionMetadata(attn_mask=mask)
                prepare_attention(layer, {"logged_once": record}, {"logged_once": (length, length)})
    assert len([line for line in caplog.messages if "logged_once" in line]) == 1


def test_a_build_without_varlen_takes_no_padding_masks() -> None:
    from omni_attn.backends.flash_attn import FlashAttentionBackend

    flags = {"fa3-fwd": frozenset({"FLASHATTENTION_DISABLE_VARLEN"})}
    device = type(HOPPER)(
        kind="cuda", name="sm_90", capability=HOPPER.capability, packages=HOPPER.packages, build_flags=flags
    )
    request = AttentionRequest(role="self", num_heads=4, head_size=64, mask_usage="padding")
    reasons = evaluate(FlashAttentionBackend.facts, request, device)
    assert any("FLASHATTENTION_DISABLE_VARLEN" in reason and "padding" in reason for reason in reasons)


@pytest.mark.parametrize("device", ["cuda:7", "nonsense"])
def test_a_device_that_is_not_here(device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        current_omni_platform(device)
