"""A layer that meets one dtype after another ends where it would have begun, and a refused one leaves it as it was."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, attention_report, prepare_attention, use_attention_config
from omni_attn.errors import MetadataError, OmniAttnError
from omni_attn.ops.reference import reference_attention
from omni_attn.testing import fake_device, fake_kernels
from tests.layer.stands import HEAD_SIZE, assert_close, tensors

HOPPER = fake_device("sm_90", packages={"flash-attn-3": "3.0.0"}, cudnn=91900)
FLASH_THEN_SDPA = {"default": {"backend": "FLASH_ATTN", "fallback": ["TORCH_SDPA"]}}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WITHOUT_KERNEL = torch.float8_e4m3fn


def build(config: Any = None, **needs: Any) -> Attention:
    with use_attention_config(config, platform=HOPPER):
        return Attention(4, HEAD_SIZE, role="self", mask_usage="never", **needs)


def state(layer: Attention) -> tuple[Any, ...]:
    """What is selected and runs; why is told in terms of the dtype that decided it, so it is left out."""
    assert layer.selection is not None
    row = attention_report(layer).rows[0]
    chosen = layer.selection.label, layer.selection.source, layer.selection.index, layer.group_id
    return *chosen, type(layer.impl), layer.route, row.backend, row.variant, row.impl, row.route


def call(dtype: torch.dtype, tokens: int = 4) -> list[torch.Tensor]:
    return [x.to(dtype) for x in tensors(1, tokens, tokens)]


@pytest.mark.parametrize("config", [None, FLASH_THEN_SDPA], ids=["default", "fallback"])
@pytest.mark.parametrize("stated", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("order", list(permutations(DTYPES)), ids=lambda o: "-".join(str(d)[6:] for d in o))
def test_the_order_of_dtypes_does_not_matter(
    config: Any, stated: str | None, order: tuple[torch.dtype, ...]
) -> None:
    with fake_kernels("FLASH_ATTN") as log:
        layer = build(config, dtype=stated)
        for dtype in order:
            fresh = build(config, dtype=dtype)
            fresh(*call(dtype))
            log.calls.clear()
            assert_close(layer(*call(dtype)), reference_attention(*call(dtype))[0])
            assert state(layer) == state(fresh)
            assert len(log.calls) == (dtype != torch.float32)


def test_what_was_prepared_before_the_dtype_was_known_does_not_bind() -> None:
    with fake_kernels("FLASH_ATTN") as log:
        layers = torch.nn.ModuleList([build(), build()])
        record = AttentionMetadata()
        prepare_attention(layers, {"self": record}, {"self": (4, 4)})
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            for layer in layers:
                assert_close(layer(*call(dtype), record), reference_attention(*call(dtype))[0])
            assert len({layer.group_id for layer in layers}) == 1
        assert len(log.calls) == 2
        with pytest.raises(MetadataError, match=r"4 query.*5"):
            layers[0](*call(torch.bfloat16, tokens=5), record)


@pytest.mark.parametrize("config", [None, FLASH_THEN_SDPA, "FLASH_ATTN", "TORCH_SDPA"], ids=str)
@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_dtype_that_nothing_runs_leaves_the_layer_usable(config: Any, calls_before: int) -> None:
    with fake_kernels("FLASH_ATTN"):
        layer = build(config)
        for _ in range(calls_before):
            layer(*call(torch.bfloat16))
        before = state(layer)
        for _ in range(2):
            with pytest.raises(OmniAttnError, match=r'"self"(.|\n)*float8_e4m3fn'):
                layer(*call(WITHOUT_KERNEL))
            assert state(layer) == before
        assert_close(layer(*call(torch.bfloat16)), reference_attention(*call(torch.bfloat16))[0])
