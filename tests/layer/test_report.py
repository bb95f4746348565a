"""attention_report: which kernel each role of a built model runs, and why."""

from __future__ import annotations

import json

from torch import nn

from omni_attn import (
    Attention,
    AttentionConfig,
    AttentionMetadata,
    attention_report,
    prepare_attention,
    use_attention_config,
)
from omni_attn.config import load_config
from omni_attn.testing import fake_device, fake_kernels
from tests.layer.stands import HEAD_SIZE, Stand, every_stand

HOPPER = fake_device("sm_90", packages={"flash-attn-3": "3.0.0"}, cudnn=91900)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1 = Attention(4, 64, role="self", role_category="self", mask_usage="never")
        self.attn2 = Attention(4, 64, role="cross", role_category="cross", mask_usage="never")


def build(config: AttentionConfig, blocks: int = 2) -> nn.Sequential:
    with fake_kernels("FLASH_ATTN"), use_attention_config(config, platform=HOPPER):
        return nn.Sequential(*(Block() for _ in range(blocks)))


def test_one_row_per_role() -> None:
    config = load_config({"default": "CUDNN_ATTN", "per_role": {"self": "TORCH_SDPA"}})
    first, second = attention_report(build(config)).rows
    assert (first.role, first.role_category, first.layers) == ("self", "self", 2)
    assert (first.backend, first.variant, first.impl) == ("TORCH_SDPA", None, "TorchSDPAImpl")
    assert first.source == "per_role['self']" and first.names == ("0.attn1", "1.attn1")
    assert (second.role, second.backend, second.source) == ("cross", "CUDNN_ATTN", "default")
    assert first.fallbacks_taken == second.fallbacks_taken == 0


def test_roles_of_one_group_keep_their_own_rows() -> None:
    model = build(AttentionConfig(default="TORCH_SDPA"))
    assert model[0].attn1.group_id == model[0].attn2.group_id
    assert [row.role for row in attention_report(model).rows] == ["self", "cross"]


def test_a_category_and_a_default_name_their_source() -> None:
    rows = attention_report(build(load_config({"per_role": {"cross": "TORCH_SDPA"}}))).rows
    assert [row.source for row in rows] == ["platform default", "per_role['cross']"]
    assert (rows[0].backend, rows[0].variant, rows[0].route) == ("FLASH_ATTN", "fa3", "FLASH_ATTN (fa3)")


def test_the_reason_names_what_was_passed_over() -> None:
    nothing_installed = fake_device("sm_90")
    with use_attention_config(AttentionConfig(), platform=nothing_installed):
        (row, _) = attention_report(Block()).rows
    assert row.backend == "TORCH_SDPA"
    assert "FLASH_ATTN" in row.reason and "fa3-fwd" in row.reason and "CUDNN_ATTN" in row.reason


def test_a_fallback_taken_at_selection_is_the_reason() -> None:
    config = load_config({"default": {"backend": "FLASH_ATTN", "fallback": ["TORCH_SDPA"]}})
    with use_attention_config(config, platform=fake_device("sm_100")):
        (row, _) = attention_report(Block()).rows
    assert (row.backend, row.source) == ("TORCH_SDPA", "default")
    assert "FLASH_ATTN" in row.reason and "10.0" in row.reason


def test_custom_attention_has_a_row() -> None:
    with use_attention_config(AttentionConfig(), device="cpu"):
        layer = Attention(
            4, HEAD_SIZE, role="self", custom_attention=nn.Identity(), skip_sequence_parallel=True
        )
    (row,) = attention_report(layer).rows
    assert (row.backend, row.impl, row.layers) == ("custom_attention", "Identity", 1)


@every_stand
def test_text_and_json_say_what_the_layer_says(stand: Stand) -> None:
    with stand.kernels():
        layer = stand.layer(4, HEAD_SIZE)
        prepare_attention(layer, {"self": AttentionMetadata()}, {"self": stand.lengths(3, 4)})
    report = attention_report(layer)
    text, plain = str(report), json.loads(json.dumps(report.to_dict()))
    for part in ('"self"', layer.route, "default", stand.name):
        assert part in text
    (row,) = plain["roles"]
    assert (row["role"], row["backend"], row["variant"]) == ("self", stand.name, stand.variant)


def test_a_model_without_attention_has_no_rows() -> None:
    assert attention_report(nn.Linear(2, 2)).rows == ()
