"""RAINFUSION_ATTN says what it selects: the selection, executed, is its output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, VideoLayout, use_attention_config
from omni_attn.errors import ConfigError
from omni_attn.ops.block_sparse.selection import BlockSelection
from omni_attn.testing import fake_device, fake_kernels
from tests.backends.rainfusion_layers import JOINT, blocks_of, config, layer
from tests.inspection.stubs import EXECUTOR
from tests.ops.block_inputs import HEADS, SCALE, as_lists, waves


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with blocks_of(32):
        yield


def selection_of(
    attention: Attention, tensors: tuple[torch.Tensor, ...], record: AttentionMetadata
) -> BlockSelection | None:
    made = record.prepared(attention.group_id)
    assert made is not None and attention.impl is not None
    return attention.impl.select_blocks(*tensors, made.product)


@pytest.mark.parametrize("behind", [0, 9])
def test_the_selection_is_what_runs(behind: int) -> None:
    tensors, attention = waves(232 + behind), layer(sparsity=0.5)
    record = AttentionMetadata(video_layout=JOINT)
    output = attention(*tensors, record)
    selection = selection_of(attention, tensors, record)
    assert selection is not None and selection.coarse is None
    assert selection.query_blocks.tokens == selection.key_blocks.tokens == 232
    used = [x[:, :232] for x in tensors]
    packed = EXECUTOR.pack(*used, selection.query_blocks, selection.key_blocks)
    torch.testing.assert_close(EXECUTOR.attend(packed, selection.selected, SCALE), output[:, :232])


def test_the_published_map() -> None:
    tensors, attention = waves(232), layer(sparsity=0.5)
    record = AttentionMetadata(video_layout=JOINT)
    attention(*tensors, record)
    selection = selection_of(attention, tensors, record)
    assert selection is not None
    every = list(range(8))
    found = as_lists(selection.selected)
    assert found[:3] == [every, every, [0, 1, 2, 5, 6, 7]] and found[6:] == [every, every]


def test_a_dense_step_selects_nothing() -> None:
    tensors, attention = waves(232), layer(sparsity=0.5, start_step=2)
    early, late = (AttentionMetadata(video_layout=JOINT, step=step, num_steps=4) for step in (1, 2))
    for record in (early, late):
        attention(*tensors, record)
    assert selection_of(attention, tensors, early) is None
    assert selection_of(attention, tensors, late) is not None


def test_a_package_that_selects_inside_says_so() -> None:
    npu = fake_device("npu", packages={"mindiesd": "3.1.0"})
    record = AttentionMetadata(video_layout=VideoLayout((), ((5, 8, 16),), 640))
    tensors = tuple(torch.randn(1, 640, HEADS, 64).half() for _ in range(3))
    with blocks_of(128), fake_kernels("RAINFUSION_ATTN", "mindiesd"):
        with use_attention_config(config(sparsity=0.5), platform=npu):
            attention = Attention(HEADS, 64, role="self", video_grid=True)
        attention(*tensors, record)
        with pytest.raises(ConfigError, match=r"RAINFUSION_ATTN \(mindiesd\): which blocks .* variant torch"):
            selection_of(attention, tensors, record)
