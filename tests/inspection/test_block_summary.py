"""BLOCK_SUMMARY_ATTN says what it computes: blocks selected, and means of all others in the same softmax."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from omni_attn import AttentionMetadata, PackedPadding
from omni_attn.inspection.capture import CapturedCall
from omni_attn.inspection.figures import figures_of_all
from omni_attn.inspection.inspection import inspect_call
from omni_attn.inspection.mass import compare_with_dense
from omni_attn.inspection.speed import predicted_speedup
from omni_attn.inspection.target import Target
from omni_attn.ops.block_sparse.selection import BlockSelection, token_pairs
from tests.backends.block_summary_layers import JOINT, blocks_of, layer
from tests.ops.block_inputs import HEADS, SCALE, waves


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with blocks_of(16):
        yield


def looked_at(tokens: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, BlockSelection]:
    """Query, key and value of a call, its output, and its selection."""
    tensors, attention, record = waves(tokens), layer(sparsity=0.5), AttentionMetadata(video_layout=JOINT)
    output = attention(*tensors, record)
    made = record.prepared(attention.group_id)
    assert made is not None and attention.impl is not None
    selection = attention.impl.select_blocks(*tensors, made.product)
    assert selection is not None
    return tensors, output, selection


@pytest.mark.parametrize("behind", [0, 9])
@pytest.mark.parametrize("chunk_scores", [1, 2**25])
def test_the_kernel_is_held_to_blocks_and_means(behind: int, chunk_scores: int) -> None:
    tensors, output, selection = looked_at(50 + behind)
    found = compare_with_dense(*tensors, output, selection, SCALE, chunk_scores=chunk_scores)
    figures = figures_of_all(selection, found)
    assert figures.kernel_error < 1e-12
    # Over waves, the means of blocks are no good keys: with them, something else than the selection alone comes out.
    assert abs(figures.error - figures.error_without_coarse) > 0.05
    without = compare_with_dense(*tensors, output, selection._replace(summaries=False), SCALE)
    assert figures_of_all(selection, without).kernel_error > 0.05


def test_means_count_in_the_prediction() -> None:
    _, _, selection = looked_at(50)
    computed = int(token_pairs(selection).sum()) / HEADS
    assert predicted_speedup(selection) == pytest.approx(50 * 50 / (computed + 4 * 4 / 2 + 50 * 4))


def test_dense_attention_beside_it_knows_of_no_padding() -> None:
    """What lies behind the tokens in use would be a key to it, NaN too."""
    query, key, value = (torch.cat([x, torch.full_like(x[:, :9], float("nan"))], dim=1) for x in waves(50))
    attention, record = layer(sparsity=0.5), AttentionMetadata(packed_padding=PackedPadding(50, 50))
    output = attention(query, key, value, record)
    call = CapturedCall(
        target=Target(0, 0),
        layer=attention,
        name="blocks.0",
        query=query,
        key=key,
        value=value,
        record=record,
        output=output,
    )
    found = inspect_call(call, rounds=1)
    assert found.dense_error < 1e-12 and found.total.kernel_error < 1e-12 and found.added == "means"
