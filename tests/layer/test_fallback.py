"""Fallbacks that a step asks for: taken while building, logged once, counted, reported, never after a kernel."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, attention_report, prepare_attention, use_attention_config
from omni_attn.config import load_config
from omni_attn.errors import MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.testing import fake_device, fake_kernels
from tests.layer.counting import counting_backend
from tests.layer.stands import assert_close, tensors


def grid() -> AttentionMetadata:
    return AttentionMetadata(vsa_dit_seq_shape=(1, 2, 3))


def refuses_grids(record: AttentionMetadata, lengths: tuple[int, int]) -> bool:
    return record.vsa_dit_seq_shape is not None


def build(*fallbacks: Any, first: str = "PICKY", **needs: Any) -> Attention:
    config = load_config({"default": {"backend": first, "fallback": list(fallbacks)}})
    with use_attention_config(config, device="cpu"):
        return Attention(4, 8, role="self", **needs)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_refusal_of_a_step_takes_the_fallback() -> None:
    query, key, value = tensors(1, 6, 6)
    with counting_backend("PICKY", refuse=refuses_grids) as picky:
        layer = build("TORCH_SDPA")
        assert layer.route == "PICKY" and layer.fallbacks_taken == 0
        record = grid()
        prepare_attention(layer, {"self": record}, {"self": (6, 6)})
        output = layer(query, key, value, record)
        assert not picky.products and layer.route == "TORCH_SDPA" and layer.fallbacks_taken == 1
        assert layer.selection is not None and layer.selection.backend == "PICKY"
        assert_close(output, reference_attention(query, key, value)[0])
        # a step that can be expressed goes back to the choice
        plain = AttentionMetadata()
        prepare_attention(layer, {"self": plain}, {"self": (6, 6)})
        layer(query, key, value, plain)
        assert len(picky.products) == 1 and layer.route == "PICKY" and layer.fallbacks_taken == 1


def test_the_fallbacks_impl_is_made_while_constructing() -> None:
    with counting_backend("PICKY", refuse=refuses_grids), counting_backend("SECOND") as second:
        layer = build("SECOND")
        assert second.constructed == 1
        prepare_attention(layer, {"self": grid()}, {"self": (6, 6)})
        assert second.constructed == 1 and len(second.builds) == 1


def test_each_step_counts_and_one_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with counting_backend("PICKY", refuse=refuses_grids), caplog.at_level(logging.INFO, "omni_attn"):
        layer = build("TORCH_SDPA", prefix="blocks.0.attn")
        for step in range(3):
            record = grid().at_step(step)
            prepare_attention(layer, {"self": record}, {"self": (6, 6)})
        assert layer.fallbacks_taken == 3
    lines = [line for line in warnings_of(caplog) if "TORCH_SDPA" in line]
    assert len(lines) <= 1, lines  # once per process, so that an earlier test may have it


def test_the_line_names_role_choice_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(record: AttentionMetadata, lengths: tuple[int, int]) -> bool:
        return True

    with counting_backend("NAMED_ONCE", refuse=refuse), caplog.at_level(logging.INFO, "omni_attn"):
        layer = build("TORCH_SDPA", first="NAMED_ONCE")
        for _ in range(3):
            prepare_attention(layer, {"self": AttentionMetadata()}, {"self": (6, 6)})
    (line,) = warnings_of(caplog)
    for part in ('"self"', "TORCH_SDPA", "NAMED_ONCE cannot express this step"):
        assert part in line


def test_the_report_shows_it() -> None:
    with counting_backend("PICKY", refuse=refuses_grids):
        layer = build("TORCH_SDPA")
        (before,) = attention_report(layer).rows
        prepare_attention(layer, {"self": grid()}, {"self": (6, 6)})
        (after,) = attention_report(layer).rows
    assert (before.route, before.fallbacks_taken) == ("PICKY", 0)
    assert (after.backend, after.route, after.fallbacks_taken) == ("PICKY", "TORCH_SDPA", 1)
    assert "TORCH_SDPA" in str(attention_report(layer))


def test_the_next_fallback_is_asked_and_in_the_end_the_first_refusal_raises() -> None:
    def refuse(record: AttentionMetadata, lengths: tuple[int, int]) -> bool:
        return record.vsa_dit_seq_shape is not None

    with counting_backend("PICKY", refuse=refuse), counting_backend("ALSO_PICKY", refuse=refuse):
        layer = build("ALSO_PICKY", "TORCH_SDPA")
        prepare_attention(layer, {"self": grid()}, {"self": (6, 6)})
        assert layer.route == "TORCH_SDPA"
        with pytest.raises(MetadataError, match="PICKY cannot express"):
            prepare_attention(build("ALSO_PICKY"), {"self": grid()}, {"self": (6, 6)})


def test_without_a_fallback_a_refusal_raises_and_leaves_nothing_prepared() -> None:
    record = grid()
    with counting_backend("PICKY", refuse=refuses_grids):
        layer = build()
        with pytest.raises(MetadataError, match=r'"self".*PICKY'):
            prepare_attention(layer, {"self": record}, {"self": (6, 6)})
        assert not record.memo and layer.fallbacks_taken == 0


def test_never_after_a_kernel_ran() -> None:
    def breaks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("kernel failed")

    with counting_backend("BREAKS", kernel=breaks), counting_backend("SECOND") as second:
        layer = build("SECOND", first="BREAKS")
        with pytest.raises(RuntimeError, match="kernel failed"):
            layer(*tensors(1, 3, 3))
        assert not second.products and layer.fallbacks_taken == 0


def test_a_metadata_error_of_a_kernel_is_no_refusal_of_a_step() -> None:
    def breaks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raise MetadataError("too late")

    with counting_backend("BREAKS", kernel=breaks), counting_backend("SECOND") as second:
        layer = build("SECOND", first="BREAKS")
        with pytest.raises(MetadataError, match="too late"):
            layer(*tensors(1, 3, 3))
        assert not second.products


def test_flash_attention_hands_arbitrary_masks_to_the_fallback() -> None:
    device = fake_device("sm_90", packages={"flash-attn-3": "3.0.0"})
    config = load_config({"default": {"backend": "FLASH_ATTN", "fallback": ["TORCH_SDPA"]}})
    query, key, value = (x.bfloat16() for x in tensors(2, 5, 6))
    keep = torch.rand(2, 1, 5, 6, generator=torch.Generator().manual_seed(1)) > 0.4
    with fake_kernels("FLASH_ATTN") as log, use_attention_config(config, platform=device):
        layer = Attention(4, 8, role="self")
        output = layer(query, key, value, AttentionMetadata(attn_mask=keep))
        assert not log.calls and layer.route == "TORCH_SDPA" and layer.fallbacks_taken == 1
        assert_close(output, reference_attention(query, key, value, attn_mask=keep)[0])
        layer(query, key, value)
        assert log.calls == ["flash_attn_func"] and layer.route == "FLASH_ATTN (fa3)"
