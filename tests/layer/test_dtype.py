"""A dtype that nobody stated is judged by the first call."""

from __future__ import annotations

import pytest
import torch

from omni_attn import Attention, AttentionConfig, use_attention_config
from omni_attn.config import load_config
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.testing import fake_device, fake_kernels
from tests.layer.stands import HEAD_SIZE, STANDS, Stand, assert_close, tensors

HOPPER = fake_device("sm_90", packages={"flash-attn-3": "3.0.0"}, cudnn=91900)
half_only = pytest.mark.parametrize(
    "stand", [stand for stand in STANDS if "float32" not in stand.facts.dtypes], ids=str
)


@half_only
def test_a_stated_dtype_is_refused_while_building(stand: Stand) -> None:
    with stand.kernels(), pytest.raises(BackendRejectedError) as raised:
        stand.layer(4, HEAD_SIZE, dtype="float32")
    assert stand.name in str(raised.value) and "float32" in str(raised.value)


@half_only
def test_an_unknown_dtype_is_refused_by_the_first_call(stand: Stand) -> None:
    in_float32 = tensors(1, *stand.lengths(3, 3))
    with stand.kernels() as log:
        layer = stand.layer(4, HEAD_SIZE)
        with pytest.raises(MetadataError) as raised:
            layer(*in_float32)
        assert not log.calls, "the kernel ran on a dtype that it does not have"
        for part in ('"self"', stand.name, "float32"):
            assert part in str(raised.value)
        # the refusal leaves the layer usable, and a right call before does not hide a wrong one behind it
        query, key, value = (x.to(stand.dtype) for x in in_float32)
        layer(query, key, value)
        with pytest.raises(MetadataError, match="float32"):
            layer(*in_float32)


def test_a_default_moves_on() -> None:
    query, key, value = tensors(1, 3, 4)
    with fake_kernels("FLASH_ATTN") as log, use_attention_config(AttentionConfig(), platform=HOPPER):
        layer = Attention(4, HEAD_SIZE, role="self", mask_usage="never")
        assert layer.selection is not None and layer.selection.backend == "FLASH_ATTN"
        before = layer.group_id
        output = layer(query, key, value)
    assert layer.selection.backend == layer.route == "TORCH_SDPA"
    assert layer.selection.source == "platform default" and layer.group_id != before
    assert any("float32" in reason for verdict in layer.selection.verdicts for reason in verdict.reasons)
    assert not log.calls
    assert_close(output, reference_attention(query, key, value)[0])


def test_a_default_that_takes_the_dtype_stays() -> None:
    with fake_kernels("FLASH_ATTN") as log, use_attention_config(AttentionConfig(), platform=HOPPER):
        layer = Attention(4, HEAD_SIZE, role="self", mask_usage="never")
        layer(*(x.bfloat16() for x in tensors(1, 3, 4)))
    assert layer.selection is not None and layer.selection.backend == "FLASH_ATTN" and len(log) == 1


def test_a_declared_fallback_serves_the_dtype() -> None:
    """A fallback applies at selection, and an unknown dtype is judged as selection would have judged it."""
    config = load_config({"default": {"backend": "FLASH_ATTN", "fallback": ["TORCH_SDPA"]}})
    query, key, value = tensors(1, 3, 4)
    with fake_kernels("FLASH_ATTN") as log, use_attention_config(config, platform=HOPPER):
        layer = Attention(4, HEAD_SIZE, role="self", mask_usage="never")
        output = layer(query, key, value)
    assert not log.calls and layer.route == "TORCH_SDPA"
    assert_close(output, reference_attention(query, key, value)[0])


def test_the_scope_states_the_dtype_for_layers_that_do_not() -> None:
    with (
        fake_kernels("FLASH_ATTN"),
        use_attention_config(AttentionConfig(), platform=HOPPER, dtype=torch.float32),
    ):
        hinted = Attention(4, HEAD_SIZE, role="self", mask_usage="never")
        own = Attention(4, HEAD_SIZE, role="self", mask_usage="never", dtype=torch.bfloat16)
    assert hinted.selection is not None and hinted.selection.backend == "TORCH_SDPA"
    assert own.selection is not None and own.selection.backend == "FLASH_ATTN"
