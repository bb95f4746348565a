"""Fallbacks that a step asks for: taken while building, logged once, counted, reported, never after a kernel."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from omni_attn import Attention, AttentionMetadata, attention_report, prepare_attention, use_attention_config
from omni_attn.config import load_config
from omni_attn.errors import MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.testing import fake_device, fake_kernels
from tests.layer.counting import counting_backend
from tests.layer.stands import HEAD_SIZE, assert_close, tensors


def grid() -> AttentionMetadata:
    return AttentionMetadata(vsa_dit_seq_shape=(1, 2, 3))


def refuses_grids(record: AttentionMetadata, lengths: tuple[int, int]) -> bool:
    return record.vsa_dit_seq_shape is not None


def build(*fallbacks: Any, first: str = "PICKY", **needs: Any) -> Attention:
    config = load_config({"default": {"backend": first, "fallback": list(fallbacks)}})
    with use_attention_config(config, device="cpu"):
        return Attention(4, HEAD_SIZE, role="self", **needs)


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
        layer = Attention(4, HEAD_SIZE, role="self")
        output = layer(query, key, value, AttentionMetadata(attn_mask=keep))
        assert not log.calls and layer.route == "TORCH_SDPA" and layer.fallbacks_taken == 1
        assert_close(output, reference_attention(query, key, value, attn_mask=keep)[0])
        layer(query, key, value)
        assert log.calls == ["flash_attn_func"] and layer.route == "FLASH_ATTN (fa3)"


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "lazy"])
@pytest.mark.parametrize("from_base", [True, False], ids=["from one base", "step after step"])
def test_a_fallback_for_one_step_is_left_at_the_next(prepared: bool, from_base: bool) -> None:
    def refuses_step_0(record: AttentionMetadata, lengths: tuple[int, int]) -> bool:
        return record.step == 0

    steps = frozenset({"step"})
    with counting_backend("PICKY", reads=steps, refuse=refuses_step_0) as picky:
        layer, base = build("TORCH_SDPA"), AttentionMetadata()
        record, routes = base, []
        for step in (0, 1, 2, 0):
            record = (base if from_base else record).at_step(step)
            if prepared:
                prepare_attention(layer, {"self": record}, {"self": (6, 6)})
            layer(*tensors(1, 6, 6), record)
            routes.append(layer.route)
        assert routes == ["TORCH_SDPA", "PICKY", "PICKY", "TORCH_SDPA"]
        assert len(picky.products) == 2 and layer.fallbacks_taken == 2


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "lazy"])
def test_layers_that_share_a_record_all_tell_the_fallback(prepared: bool) -> None:
    with counting_backend("PICKY", refuse=refuses_grids) as picky:
        model, record = nn.ModuleList(build("TORCH_SDPA") for _ in range(3)), grid()
        if prepared:
            prepare_attention(model, {"self": record}, {"self": (6, 6)})
        for layer in model:
            layer(*tensors(1, 6, 6), record)
        assert len(picky.builds) == 1 and not picky.products
        assert {layer.route for layer in model} == {"TORCH_SDPA"}
        assert all("PICKY cannot express" in layer.fallback_reason for layer in model)
        (row,) = attention_report(model).rows
        assert (row.layers, row.backend, row.route, row.impl) == (3, "PICKY", "TORCH_SDPA", "TorchSDPAImpl")
        assert "PICKY cannot express" in row.reason and row.fallbacks_taken >= 1


def test_a_layer_that_went_back_leaves_the_others_row() -> None:
    with counting_backend("PICKY", refuse=refuses_grids):
        model, record = nn.ModuleList(build("TORCH_SDPA") for _ in range(2)), grid()
        for layer in model:
            layer(*tensors(1, 6, 6), record)
        model[0](*tensors(1, 6, 6))
        rows = attention_report(model).rows
    assert [(row.route, row.layers) for row in rows] == [("PICKY", 1), ("TORCH_SDPA", 1)]
    assert "cannot express" not in rows[0].reason and "PICKY cannot express" in rows[1].reason


@pytest.mark.parametrize("calls", [1, 3])
def test_two_records_in_turn_keep_route_and_numbers_apart(calls: int) -> None:
    query, key, value = tensors(1, 6, 6)
    expected = reference_attention(query, key, value)[0]
    with counting_backend("PICKY", refuse=refuses_grids) as picky:
        layer, masked, plain = build("TORCH_SDPA"), grid(), AttentionMetadata()
        for turn in range(1, 3):
            for record, route in ((masked, "TORCH_SDPA"), (plain, "PICKY")):
                prepare_attention(layer, {"self": record}, {"self": (6, 6)})
                for _ in range(calls):
                    assert_close(layer(query, key, value, record), expected)
                    assert layer.route == route
            assert len(picky.products) == turn * calls


def test_the_route_is_the_one_of_the_last_call_whatever_was_prepared_since() -> None:
    with counting_backend("PICKY", refuse=refuses_grids) as picky:
        layer, plain = build("TORCH_SDPA"), AttentionMetadata()
        layer(*tensors(1, 6, 6), plain)
        prepare_attention(layer, {"self": grid()}, {"self": (6, 6)})
        layer(*tensors(1, 6, 6), plain)
        assert len(picky.products) == 2 and layer.route == "PICKY" and layer.fallback_reason is None
