"""RAINFUSION_ATTN: which sizes, and which layers of Wan, are sparse, and what is told of the others (fault B43)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omni_attn import (
    AttentionMetadata,
    VideoLayout,
    prepare_attention,
    use_attention_config,
)
from omni_attn.backends.rainfusion_builder import RainFusionMetadataBuilder
from omni_attn.models.wan import WAN_PRESETS, WanModel
from omni_attn.ops.block_sparse.rainfusion import RainFusionLayout, rainfusion_blocks
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.rainfusion import rainfusion_attention
from omni_attn.ops.reference import reference_attention
from omni_attn.products import _logged
from omni_attn.routes import layer_index_of
from tests.backends.rainfusion_layers import DENSE, JOINT, SPARSE, blocks_of, config, layer, told
from tests.ops.block_inputs import SCALE, waves


@pytest.fixture
def small_blocks() -> Iterator[None]:
    with blocks_of(32):
        yield


@pytest.fixture(autouse=True)
def _nothing_told_yet() -> None:
    _logged.clear()


def test_skipped_layers_of_wan_go_by_block() -> None:
    with use_attention_config(config(skip_layers=[1]), device="cpu"):
        model = WanModel(WAN_PRESETS["wan-tiny"].transformer)
    records = model.attention_records((2, 4, 4))
    lengths = model.config.attention_lengths((2, 4, 4), text_tokens=512, image_tokens=0)
    prepare_attention(model, records, lengths)
    reasons = [block.attn1.attention.route_reason for block in model.blocks]
    assert ["skip_layers" in reason for reason in reasons] == [n == 1 for n in range(len(reasons))]


@pytest.mark.parametrize("tokens", [128, 192, 200, 90])
def test_b43_a_size_that_stays_dense_is_told_once(tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="omni_attn")
    calls = waves(tokens)
    layers = [layer(prefix=f"blocks.{number}", sparsity=0.9) for number in range(3)]
    for attention in layers:
        for _ in range(2):
            record = AttentionMetadata(vsa_dit_seq_shape=(1, tokens // 2, 2))
            output = attention(*calls, record)
            torch.testing.assert_close(output, reference_attention(*calls)[0])
        assert attention.routes_taken == {DENSE: 2}
        assert str(tokens) in (attention.route_reason or "")
    (text,) = told(caplog, logging.WARNING)
    for part in (
        'role "self"',
        "RAINFUSION_ATTN",
        "SDPA",
        "4096 video tokens",
        f"found {tokens} of {tokens}",
    ):
        assert part in text


@pytest.mark.parametrize("tokens", [128, 192, 200, 90])
def test_b43_the_same_sizes_sparse(tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="omni_attn")
    calls, grid = waves(tokens), (tokens // 2, 1, 2)
    with blocks_of(128):
        attention = layer(sparsity=0.9)
        output = attention(*calls, AttentionMetadata(vsa_dit_seq_shape=grid))
    assert attention.routes_taken == {SPARSE: 1} and not told(caplog, logging.WARNING)
    blocks = rainfusion_blocks(RainFusionLayout(tokens, ((0, grid),)), 128, torch.device("cpu"))
    assert sum(blocks.partition.sizes) == tokens  # the tail is a block of its own
    expected = rainfusion_attention(TorchExecutor(), *calls, blocks, 0.9, SCALE)
    torch.testing.assert_close(output, expected)


def test_the_size_rule_holds_at_its_own_number() -> None:
    builder = RainFusionMetadataBuilder(num_heads=2, num_kv_heads=2, head_size=8, softmax_scale=1.0)
    for rows, route in ((4095, "SDPA"), (4096, "RAINFUSION")):
        layout = VideoLayout((100,), ((1, 1, rows),), rows + 100)
        made = builder.build(AttentionMetadata(video_layout=layout), (rows + 100, rows + 100))
        assert made.route == route and made.runs_kernel == (route == "RAINFUSION")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("options", "record", "tokens", "parts"),
    [
        ({"sparsity": 0.0}, AttentionMetadata(video_layout=JOINT), 232, ["sparsity is 0"]),
        ({}, AttentionMetadata(), 232, ["video_layout", "vsa_dit_seq_shape"]),
        (
            {},
            AttentionMetadata(video_layout=VideoLayout((3,), ((1, 5, 8), (1, 5, 8)), 83)),
            83,
            ["21 too few", "1 x 5 x 8 and 1 x 5 x 8", "32"],
        ),
    ],
)
def test_other_rules_that_keep_a_step_dense(
    options: dict[str, Any],
    record: AttentionMetadata,
    tokens: int,
    parts: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    attention, calls = layer(**options), waves(tokens)
    torch.testing.assert_close(attention(*calls, record), reference_attention(*calls)[0])
    assert attention.route == DENSE
    (text,) = told(caplog, logging.WARNING)
    assert all(part in text for part in parts)


@pytest.mark.parametrize(
    ("prefix", "number"),
    [
        ("blocks.12.attn1", 12),
        ("transformer_2.blocks.3.attn1.0", 3),
        ("", None),
        ("refiner", None),
        ("a.²", None),
    ],
)
def test_a_layers_number_is_the_first_whole_number_of_its_prefix(prefix: str, number: int | None) -> None:
    assert layer_index_of(prefix) == number
