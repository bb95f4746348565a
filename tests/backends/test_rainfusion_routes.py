"""RAINFUSION_ATTN: which steps, layers and sizes are sparse, and what is told of those that are not (fault B43)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from omni_attn import (
    AttentionMetadata,
    VideoLayout,
    attention_report,
    prepare_attention,
    use_attention_config,
)
from omni_attn.backends.rainfusion_builder import RainFusionMetadataBuilder
from omni_attn.cli.run import report_cells
from omni_attn.models.wan import WAN_PRESETS, WanModel
from omni_attn.ops.block_sparse.rainfusion import RainFusionLayout, _rainfusion_blocks, rainfusion_blocks
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


@pytest.mark.usefixtures("small_blocks")
def test_the_first_and_the_last_steps_are_dense() -> None:
    attention, calls = layer(sparsity=0.5, start_step=2, end_step=1), waves(232)
    record = AttentionMetadata(video_layout=JOINT, num_steps=5)
    routes, outputs = [], []
    for step in range(5):
        stated = record.at_step(step)
        prepare_attention(attention, {"self": stated}, {"self": (232, 232)})
        routes.append(attention.route)
        outputs.append(attention(*calls, stated))
    assert routes == [DENSE, DENSE, SPARSE, SPARSE, DENSE]
    torch.testing.assert_close(outputs[1], reference_attention(*calls)[0])
    assert torch.equal(outputs[0], outputs[4]) and torch.equal(outputs[2], outputs[3])
    assert not torch.equal(outputs[1], outputs[2])
    assert attention.routes_taken == {DENSE: 3, SPARSE: 2}
    # What a run prints at its end is not the last step alone.
    reason = report_cells(attention_report(attention).rows[0])[-1]
    assert reason.endswith(f"ran {DENSE} in the last step; prepared: {DENSE} 3 times, {SPARSE} 2 times")


@pytest.mark.usefixtures("small_blocks")
def test_a_step_or_layer_that_nobody_stated_is_sparse_and_says_what_was_not_applied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attention = layer(sparsity=0.5, start_step=2, end_step=1, skip_layers="0-2")
    attention(*waves(232), AttentionMetadata(video_layout=JOINT))
    assert attention.route == SPARSE
    for part in ("skip_layers is not applied", "start_step is not applied", "end_step is not applied"):
        assert part in (attention.route_reason or "")
        assert part in told(caplog, logging.WARNING)[0]


@pytest.mark.usefixtures("small_blocks")
def test_a_call_of_fakes_leaves_nothing_behind() -> None:
    attention, calls, record = layer(sparsity=0.5), waves(232), AttentionMetadata(video_layout=JOINT)
    _rainfusion_blocks.cache_clear()
    with FakeTensorMode() as fakes:
        assert attention(*map(fakes.from_tensor, calls), record).shape == calls[0].shape
    assert attention.route == SPARSE and attention(*calls, record).shape == calls[0].shape


@pytest.mark.usefixtures("small_blocks")
def test_only_gated_steps_are_prepared_one_by_one() -> None:
    record = AttentionMetadata(video_layout=JOINT, num_steps=5)
    for options, kept in (({}, True), ({"start_step": 1}, False), ({"end_step": 1}, False)):
        attention = layer(sparsity=0.5, **options)
        first = record.at_step(3)
        prepare_attention(attention, {"self": first}, {"self": (232, 232)})
        assert (first.at_step(4).prepared(attention.group_id) is not None) == kept


@pytest.mark.usefixtures("small_blocks")
def test_skipped_layers_are_dense_and_share_what_is_prepared() -> None:
    names = ["blocks.0.attn1", "blocks.1.attn1", "stage.blocks.2.attn1", "refiner.attn"]
    model = nn.ModuleList([layer(prefix=name, sparsity=0.5, skip_layers="0,2") for name in names])
    groups = [attention.group_id for attention in model]  # type: ignore[union-attr]
    assert groups[0] == groups[2] and len(set(groups)) == 3
    prepare_attention(model, {"self": AttentionMetadata(video_layout=JOINT)}, {"self": (232, 232)})
    rows = {row.route: row for row in attention_report(model)}
    assert rows[DENSE].layers == 2 and "skip_layers 0, 2" in rows[DENSE].reason
    assert [attention.route for attention in model] == [DENSE, SPARSE, DENSE, SPARSE]  # type: ignore[union-attr]
    same = [layer(prefix=name, sparsity=0.5).group_id for name in names]
    assert len(set(same)) == 1  # nobody is skipped: numbers do not matter


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
