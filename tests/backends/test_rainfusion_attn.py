"""RAINFUSION_ATTN: what its sparse steps compute, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

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
from omni_attn.ops.block_sparse.rainfusion import RainFusionLayout, rainfusion_blocks
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.rainfusion import rainfusion_attention
from omni_attn.ops.reference import reference_attention
from tests.backends.rainfusion_layers import DENSE, JOINT, SPARSE, blocks_of, config, layer
from tests.ops.block_inputs import HEADS, SCALE, SIZE, waves


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with blocks_of(32):
        yield


# -- what is computed


def test_the_published_output_through_a_layer() -> None:
    attention = layer(sparsity=0.5)
    output = attention(*waves(232), AttentionMetadata(video_layout=JOINT))
    assert attention.route == SPARSE
    assert attention.route_reason == "4 of 8 blocks of 32, and 4 protected ones"
    found = output[0, 231, 1, :4]
    expected = torch.tensor([-0.047754, -0.064207, -0.070523, -0.065705], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert output.sum().item() == pytest.approx(13.841127071, abs=1e-6)
    assert output.is_contiguous()


def test_a_grid_alone_is_a_video_without_prefix() -> None:
    calls = waves(192)
    output = layer(sparsity=0.7)(*calls, AttentionMetadata(vsa_dit_seq_shape=(3, 8, 8)))
    as_layout = layer(sparsity=0.7)(
        *calls, AttentionMetadata(video_layout=VideoLayout((), ((3, 8, 8),), 192))
    )
    assert torch.equal(output, as_layout)
    dense = reference_attention(*calls)[0]
    assert (output - dense).abs().max() > 1e-3  # it did leave blocks out


def test_several_videos() -> None:
    stated = VideoLayout((20, 30), ((2, 8, 8), (3, 5, 10)), 328)
    calls = waves(328)
    output = layer(sparsity=0.8)(*calls, AttentionMetadata(video_layout=stated))
    spans = RainFusionLayout(328, ((50, (2, 8, 8)), (178, (3, 5, 10))))
    blocks = rainfusion_blocks(spans, 32, torch.device("cpu"))
    expected = rainfusion_attention(TorchExecutor(), *calls, blocks, 0.8, SCALE)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("padded", [False, True], ids=["used_len", "packed_padding"])
def test_tokens_behind_those_in_use_are_neither_read_nor_answered(dense: bool, padded: bool) -> None:
    calls = waves(232)
    longer = [torch.cat([x, torch.full_like(x[:, :9], float("nan"))], dim=1) for x in calls]
    padding = PackedPadding(232, 232) if padded else None
    attention = layer(sparsity=0.0 if dense else 0.5)
    output = attention(*longer, AttentionMetadata(video_layout=JOINT, packed_padding=padding))
    assert attention.route == (DENSE if dense else SPARSE)
    expected = attention(*calls, AttentionMetadata(video_layout=JOINT))
    torch.testing.assert_close(output[:, :232], expected)
    assert not output[:, 232:].any() and output.is_contiguous()


def test_batches_shared_key_heads_and_strided_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(2, 232, 8, SIZE, dtype=torch.float64, generator=generator)
    before = fused.clone()
    query, key, value = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    with use_attention_config(config(sparsity=0.6), device="cpu"):
        attention = Attention(4, SIZE, num_kv_heads=2, role="self", video_grid=True)
    record = AttentionMetadata(video_layout=JOINT)
    output = attention(query, key, value, record)
    assert torch.equal(fused, before)
    expanded = (x.repeat_interleave(2, dim=2) for x in (key, value))
    torch.testing.assert_close(output, layer(heads=4, sparsity=0.6)(query, *expanded, record))
    alone = attention(query[1:], key[1:], value[1:], AttentionMetadata(video_layout=JOINT))
    torch.testing.assert_close(output[1:], alone)


def test_gradients_are_those_of_attention_under_the_block_map() -> None:
    record = AttentionMetadata(video_layout=JOINT)
    leaves = [x.clone().requires_grad_() for x in waves(232)]
    attention = layer(sparsity=0.5)
    assert torch.autograd.gradcheck(
        lambda *call: attention(*call, record)[:, ::29], leaves, fast_mode=True, eps=1e-7, atol=1e-5
    )


# -- what is refused


@pytest.mark.parametrize(
    ("record", "lengths", "parts"),
    [
        (AttentionMetadata(vsa_dit_seq_shape=(2, 3, 4)), (25, 25), ["2 x 3 x 4 = 24", "25"]),
        (AttentionMetadata(video_layout=JOINT), (231, 231), ["used_len is 232", "231"]),
        (
            AttentionMetadata(video_layout=JOINT, packed_padding=PackedPadding(233, 233)),
            (240, 240),
            ["used_len is 232", "packed_padding states 233"],
        ),
        (AttentionMetadata(packed_padding=PackedPadding(5, 6)), (9, 9), ["5 and 6"]),
        (AttentionMetadata(packed_padding=PackedPadding(10, 10)), (9, 9), ["up to 9", "10"]),
        (AttentionMetadata(video_layout=JOINT), (232, 40), ["232", "40", "equal query and key lengths"]),
        (AttentionMetadata(attn_mask=torch.zeros(1, 9, dtype=torch.bool)), (9, 9), ["attn_mask"]),
        (AttentionMetadata(cu_seqlens_q=(0, 4, 9)), (9, 9), ["cu_seqlens_q"]),
    ],
)
def test_records_that_do_not_fit(
    record: AttentionMetadata, lengths: tuple[int, int], parts: list[str]
) -> None:
    with pytest.raises(MetadataError) as caught:
        layer().prepare(record, lengths)
    for part in ("RAINFUSION_ATTN", "TORCH_SDPA", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("precision", ["fp8", "mix"])
def test_precisions_of_ascend_are_refused_elsewhere(precision: str) -> None:
    with pytest.raises(BackendRejectedError, match=f"variant mindiesd .* {precision}, found"):
        layer(precision=precision)


def test_cross_attention_is_refused() -> None:
    with (
        use_attention_config("RAINFUSION_ATTN", device="cpu"),
        pytest.raises(BackendRejectedError, match=r'"cross".*RAINFUSION_ATTN.*video grid'),
    ):
        Attention(HEADS, SIZE, role="cross")
