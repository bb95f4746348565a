"""BLOCK_SUMMARY_ATTN: what a layer computes, which lengths are dense, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omni_attn import (
    Attention,
    AttentionMetadata,
    PackedPadding,
    VideoLayout,
    use_attention_config,
)
from omni_attn.errors import BackendRejectedError, MetadataError
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.block_summary import block_summary_attention
from omni_attn.ops.reference import reference_attention
from omni_attn.products import _logged
from tests.backends.block_summary_layers import DENSE, JOINT, SPARSE, blocks_of, config, layer
from tests.ops.block_inputs import HEADS, SCALE, SIZE, as_lists, waves


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with blocks_of(16):
        yield


@pytest.fixture(autouse=True)
def _nothing_told_yet() -> None:
    _logged.clear()


# -- what is computed


def test_the_published_output_through_a_layer() -> None:
    attention = layer(sparsity=0.5)
    output = attention(*waves(50))
    assert attention.route == SPARSE
    assert attention.route_reason == "2 of 4 blocks of 16, the others by their means"
    expected = torch.tensor([-0.588044, -0.819987, -0.922472, -0.879319], dtype=torch.float64)
    torch.testing.assert_close(output[0, 49, 1, :4], expected, atol=1e-6, rtol=0)
    assert output.sum().item() == pytest.approx(45.458577917, abs=1e-6)
    assert output.is_contiguous()


def test_blocks_are_of_128_tokens() -> None:
    with blocks_of(128):
        attention, calls = layer(sparsity=0.8), waves(400)
        output = attention(*calls)
    assert attention.route_reason == "1 of 4 blocks of 128, the others by their means"
    torch.testing.assert_close(output, block_summary_attention(TorchExecutor(), *calls, 128, 1, SCALE))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "stated",
    [
        {"video_layout": JOINT},
        {"packed_padding": PackedPadding(50, 50)},
        {"video_layout": JOINT, "packed_padding": PackedPadding(50, 50)},
    ],
    ids=["used_len", "packed_padding", "both"],
)
def test_tokens_behind_those_in_use_are_neither_read_nor_answered(
    dense: bool, stated: dict[str, Any]
) -> None:
    calls = waves(50)
    longer = [torch.cat([x, torch.full_like(x[:, :9], float("nan"))], dim=1) for x in calls]
    attention = layer(sparsity=0.0 if dense else 0.5)
    output = attention(*longer, AttentionMetadata(**stated))
    assert attention.route == (DENSE if dense else SPARSE)
    torch.testing.assert_close(output[:, :50], attention(*calls))
    assert not output[:, 50:].any() and output.is_contiguous()


def test_batches_shared_key_heads_and_strided_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(2, 70, 8, SIZE, dtype=torch.float64, generator=generator)
    before = fused.clone()
    query, key, value = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    with use_attention_config(config(sparsity=0.6), device="cpu"):
        attention = Attention(4, SIZE, num_kv_heads=2, role="self")
    output = attention(query, key, value)
    assert torch.equal(fused, before)
    expanded = (x.repeat_interleave(2, dim=2) for x in (key, value))
    torch.testing.assert_close(output, layer(heads=4, sparsity=0.6)(query, *expanded))
    torch.testing.assert_close(output[1:], attention(query[1:], key[1:], value[1:]))


def test_gradients_pass_the_means() -> None:
    leaves = [x.clone().requires_grad_() for x in waves(50)]
    attention = layer(sparsity=0.5)
    assert torch.autograd.gradcheck(
        lambda *call: attention(*call)[:, ::7], leaves, fast_mode=True, eps=1e-7, atol=1e-5
    )


def test_the_selection_is_what_runs_exactly() -> None:
    attention, record = layer(sparsity=0.5), AttentionMetadata(video_layout=JOINT)
    tensors = waves(59)
    attention(*tensors, record)
    made = record.prepared(attention.group_id)
    assert made is not None and attention.impl is not None
    selection = attention.impl.select_blocks(*tensors, made.product)
    assert selection is not None and selection.coarse is None
    assert selection.query_blocks.sizes == selection.key_blocks.sizes == (16, 16, 16, 2)
    assert all(len(row) == 2 for row in as_lists(selection.selected))
    dense = layer(sparsity=0.0)
    dense(*tensors, record)
    product = record.prepared(dense.group_id)
    assert product is not None and dense.impl is not None
    assert dense.impl.select_blocks(*tensors, product.product) is None


def test_a_layout_without_a_video_is_one_too() -> None:
    record = AttentionMetadata(video_layout=VideoLayout((50,), (), 50))
    attention = layer(sparsity=0.5)
    assert torch.equal(attention(*waves(50), record), attention(*waves(50)))


# -- which lengths are dense


@pytest.mark.parametrize(("sparsity", "tokens"), [(0.8, 16), (0.0, 50), (0.1, 50)])
def test_nothing_left_out_is_dense_and_told_once(
    sparsity: float, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    calls, attention = waves(tokens), layer(sparsity=sparsity)
    for _ in range(2):
        torch.testing.assert_close(attention(*calls, AttentionMetadata()), reference_attention(*calls)[0])
    assert attention.routes_taken == {DENSE: 2}
    (text,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert f"sparsity {'is 0' if sparsity == 0 else sparsity}" in text and 'role "self"' in text


def test_no_tokens() -> None:
    query, key, value = waves(0)
    assert layer(sparsity=0.5)(query, key, value).shape == (1, 0, HEADS, SIZE)
    longer = [torch.full((1, 20, HEADS, SIZE), float("nan"), dtype=torch.float64)] * 3
    padded = layer(sparsity=0.5)(*longer, AttentionMetadata(packed_padding=PackedPadding(0, 0)))
    assert not padded.any()


# -- what is refused


@pytest.mark.parametrize(
    ("record", "lengths", "parts"),
    [
        (AttentionMetadata(video_layout=JOINT), (49, 49), ["used_len is 50", "49 tokens"]),
        (
            AttentionMetadata(video_layout=JOINT, packed_padding=PackedPadding(51, 51)),
            (60, 60),
            ["used_len is 50", "packed_padding states 51"],
        ),
        (AttentionMetadata(packed_padding=PackedPadding(5, 6)), (9, 9), ["5 and 6"]),
        (AttentionMetadata(), (50, 40), ["50", "40", "equal query and key lengths"]),
        (AttentionMetadata(attn_mask=torch.zeros(1, 9, dtype=torch.bool)), (9, 9), ["attn_mask", "(1, 9)"]),
        (AttentionMetadata(cu_seqlens_q=(0, 4, 9)), (9, 9), ["cu_seqlens_q"]),
    ],
)
def test_records_that_do_not_fit(
    record: AttentionMetadata, lengths: tuple[int, int], parts: list[str]
) -> None:
    with pytest.raises(MetadataError) as caught:
        layer().prepare(record, lengths)
    for part in ("BLOCK_SUMMARY_ATTN", "TORCH_SDPA", *parts):
        assert part in str(caught.value)


def test_a_mask_that_hides_nothing_is_taken() -> None:
    record = AttentionMetadata(attn_mask=torch.ones(1, 50, dtype=torch.bool), mask_mode="none")
    attention = layer(sparsity=0.5)
    assert torch.equal(attention(*waves(50), record), attention(*waves(50)))


@pytest.mark.parametrize("precision", ["fp8", "mix"])
def test_other_precisions_are_refused(precision: str) -> None:
    with pytest.raises(BackendRejectedError, match=f"precision bf16, found {precision}"):
        layer(precision=precision)


@pytest.mark.parametrize("role", [{"role": "cross"}, {"role": "cross.image"}])
def test_cross_attention_is_refused(role: dict[str, str]) -> None:
    with (
        use_attention_config("BLOCK_SUMMARY_ATTN", device="cpu"),
        pytest.raises(
            BackendRejectedError, match=rf'{role["role"]}".*BLOCK_SUMMARY_ATTN.*needs self-attention'
        ),
    ):
        Attention(HEADS, SIZE, **role)
