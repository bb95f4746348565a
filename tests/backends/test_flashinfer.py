"""What is special about FLASHINFER_ATTN: plans, padding that the host states, packed masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, PackedPadding, prepare_attention, use_attention_config
from omni_attn.backends import flashinfer_attn, flashinfer_plans, flashinfer_shapes, stated
from omni_attn.backends.flashinfer_masks import pack_mask
from omni_attn.backends.flashinfer_plans import KEPT_PLANS
from omni_attn.backends.flashinfer_shapes import check_offsets
from omni_attn.errors import MetadataError
from omni_attn.ops.reference import reference_attention
from tests.layer.stands import HEAD_SIZE, Stand, assert_close, refusal_of, tensors

VARIANTS = ("cute-dsl", "fa3", "fa2")
NAN = float("nan")


def stand_of(variant: str) -> Stand:
    return Stand("FLASHINFER_ATTN", variant)


every_variant = pytest.mark.parametrize("stand", [stand_of(v) for v in VARIANTS], ids=str)
planned = pytest.mark.parametrize("stand", [stand_of("fa3"), stand_of("fa2")], ids=str)
maskless = pytest.mark.parametrize("stand", [stand_of("cute-dsl"), stand_of("fa3")], ids=str)


def call_of(stand: Stand, *shape: int, **more: int) -> list[torch.Tensor]:
    return [x.to(stand.dtype) for x in tensors(*shape, **more)]


# -- plans


@planned
def test_one_plan_serves_all_layers_and_steps(stand: Stand) -> None:
    call = call_of(stand, 2, 6, 9)
    with stand.kernels() as log:
        layers = torch.nn.ModuleList([stand.layer(4, HEAD_SIZE) for _ in range(3)])
        record = AttentionMetadata(step=0, num_steps=4)
        for step in range(4):
            now = record.at_step(step)
            prepare_attention(layers, {"self": now}, {"self": (6, 9)})
            for layer in layers:
                layer(*call, now)
    assert len(log.plans) == 1 and len(log.calls) == 12


@planned
def test_layers_without_a_record_share_a_plan(stand: Stand) -> None:
    call = call_of(stand, 2, 6, 9)
    with stand.kernels() as log:
        for layer in [stand.layer(4, HEAD_SIZE) for _ in range(3)]:
            layer(*call)
        assert len(log.plans) == 1
        layer(*call_of(stand, 1, 6, 9))  # another batch size
        layer(*[x.bfloat16() for x in call])  # another dtype
        stand.layer(4, HEAD_SIZE, causal=True)(*call)  # another group
        assert len(log.plans) == 4


@planned
def test_plans_that_live_at_once_do_not_disturb_one_another(stand: Stand) -> None:
    calls = [call_of(stand, 1, 6, 9), call_of(stand, 2, 6, 9), call_of(stand, 1, 6, 9, kv_heads=2)]
    with stand.kernels() as log:
        layers = [stand.layer(4, HEAD_SIZE), stand.layer(4, HEAD_SIZE, num_kv_heads=2)]
        for _ in range(2):
            for layer, call in zip((layers[0], layers[0], layers[1]), calls, strict=True):
                assert_close(layer(*call), reference_attention(*call)[0])
    assert len(log.plans) == 3


@planned
def test_few_plans_are_kept_beside_those_in_use(stand: Stand) -> None:
    with stand.kernels():
        for tokens in range(1, KEPT_PLANS + 5):
            stand.run_impl(*tensors(1, tokens, tokens))
    assert len(flashinfer_plans._plans) == KEPT_PLANS


@every_variant
def test_a_capture_needs_a_plan_and_keeps_it(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [False]
    kept: set[Any] = set()
    for module in (flashinfer_plans, flashinfer_attn):
        monkeypatch.setattr(module, "is_capturing", lambda tensor: capturing[0])
    monkeypatch.setattr(flashinfer_plans, "_captured", kept)
    query, key, value = call_of(stand, 1, 6, 6)
    with stand.kernels() as log:
        warm, cold = stand.layer(4, HEAD_SIZE), stand.layer(4, HEAD_SIZE, softmax_scale=0.5)
        expected = warm(query, key, value)
        assert not kept
        capturing[0] = True
        with pytest.raises(MetadataError, match="capture") as raised:
            cold(query, key, value)
        assert torch.equal(warm(query, key, value), expected) and len(kept) == 1
    assert "FLASHINFER_ATTN" in str(raised.value) and "(6, 6)" in str(raised.value)
    assert len(log.calls) == 2


# -- what the host knows of padding and packing runs on every variant


@every_variant
@pytest.mark.parametrize("counts", [(6,), (9,), (0,), (6, 9), (9, 9), (3, 1), (5, 0), (0, 0)])
def test_lengths_beside_a_mask_need_no_mask(stand: Stand, counts: tuple[int, ...]) -> None:
    query, key, value = call_of(stand, len(counts), 4, 9, kv_heads=2)
    mask = torch.arange(9)[None] < torch.tensor(counts)[:, None]
    expected = reference_attention(query, key, value, attn_mask=mask)[0]
    key[~mask], value[~mask] = NAN, NAN  # padding that is stated does not leak
    record = AttentionMetadata(attn_mask=mask, kv_lengths=counts)
    with stand.kernels() as log:
        if stand.variant == "cute-dsl" and 0 in counts and any(counts):
            text = refusal_of(lambda: stand.run_layer(query, key, value, record))
            assert "fa2" in text and "empty" in text
            return
        output = stand.run_layer(query, key, value, record)
    assert_close(output, expected)
    assert "single_prefill_with_kv_cache" not in log.calls and len(log.calls) == any(counts)


@every_variant
def test_lengths_of_another_batch_are_refused(stand: Stand) -> None:
    record = AttentionMetadata(attn_mask=torch.arange(9)[None] < torch.tensor([[3], [8]]), kv_lengths=(3, 8))
    with stand.kernels(), pytest.raises(MetadataError, match="2"):
        stand.run_layer(*call_of(stand, 3, 4, 9), record)


@planned
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_without_keys_or_queries(stand: Stand, causal: bool) -> None:
    cu_q, cu_k = (0, 4, 4, 7, 9), (0, 2, 5, 5, 8)
    call = call_of(stand, 1, 12, 12, kv_heads=2)
    expected = torch.zeros(call[0].shape, dtype=torch.float64)
    for rows, keys in (((0, 4), (0, 2)), ((7, 9), (5, 8))):
        parts = call[0][:, slice(*rows)], call[1][:, slice(*keys)], call[2][:, slice(*keys)]
        expected[:, slice(*rows)] = reference_attention(*parts, causal=causal)[0]
    with stand.kernels() as log:
        output = stand.run_layer(
            *call, AttentionMetadata(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k), causal=causal
        )
    assert_close(output, expected)
    assert len(log.calls) == len(log.plans) == 1


@every_variant
def test_nothing_at_all_in_use(stand: Stand) -> None:
    record = AttentionMetadata(packed_padding=PackedPadding(q_length=3, kv_length=0))
    with stand.kernels() as log:
        assert not stand.run_layer(*call_of(stand, 1, 6, 6), record).any()
    assert not log.calls and not log.plans


@maskless
def test_boundaries_on_the_device_are_refused_without_a_look(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stated, "_on_host", lambda boundaries: None)
    record = AttentionMetadata(cu_seqlens_q=torch.tensor([0, 2, 6], dtype=torch.int32))
    with stand.kernels():
        text = refusal_of(lambda: stand.run_layer(*call_of(stand, 1, 6, 6), record))
    for word in ("cu_seqlens", "host", "tuples of ints", "fa2", "TORCH_SDPA", str(stand.variant)):
        assert word in text


# -- masks


@maskless
def test_a_mask_alone_is_refused_with_the_ways_out(stand: Stand) -> None:
    record = AttentionMetadata(attn_mask=torch.tensor([[True] * 4 + [False] * 2]))
    with stand.kernels():
        text = refusal_of(lambda: stand.run_layer(*call_of(stand, 1, 6, 6), record))
        both = refusal_of(lambda: stand.run_layer(*call_of(stand, 1, 6, 6), record, causal=True))
    for word in ("attn_mask", "kv_lengths", "variant: fa2", "TORCH_SDPA"):
        assert word in text
    assert "kv_lengths" not in both and "causal" in both  # a shorter sequence would move the diagonal


@pytest.mark.parametrize("usage", ["padding", "arbitrary"])
@maskless
def test_stated_masks_choose_the_variant_that_has_them(stand: Stand, usage: Any) -> None:
    """On a machine of another variant, which runs the layer that says nothing about masks."""
    with stand.kernels(), use_attention_config("FLASHINFER_ATTN", platform=stand.platform):
        layers = [Attention(4, HEAD_SIZE, role="self", mask_usage=said) for said in (None, usage)]
    chosen = [layer.selection.variant for layer in layers if layer.selection]
    assert chosen == [stand.variant, "fa2"]


@pytest.mark.parametrize("shape", [(1, 1, 3, 5), (2, 1, 4, 4), (2, 1, 1, 1), (1, 1, 16, 8)])
def test_masks_are_packed_first_key_lowest(shape: tuple[int, ...]) -> None:
    numpy = pytest.importorskip("numpy")
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    packed = pack_mask(mask)
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    for row, bits in zip(packed, mask, strict=True):
        assert row.tolist() == numpy.packbits(bits.flatten().numpy(), bitorder="little").tolist()


def test_a_mask_that_differs_by_head_is_refused() -> None:
    stand = stand_of("fa2")
    keep = torch.ones(1, 4, 6, 6, dtype=torch.bool)
    keep[:, 1, :, 3:] = False
    with stand.kernels():
        text = refusal_of(
            lambda: stand.run_layer(*call_of(stand, 1, 6, 6), AttentionMetadata(attn_mask=keep))
        )
    assert "all heads" in text and "4" in text and "TORCH_SDPA" in text


# -- limits of the kernels


@planned
@pytest.mark.parametrize(
    ("window", "causal", "queries", "keys"),
    [((2, -1), False, 6, 6), ((2, -1), False, 3, 8), ((2, 0), True, 6, 6), ((2, 3), True, 4, 7)],
)
def test_windows_to_the_left(
    stand: Stand, window: tuple[int, int], causal: bool, queries: int, keys: int
) -> None:
    call = tensors(1, queries, keys)
    expected = reference_attention(*call, causal=causal, window=window)[0]
    with stand.kernels():
        for output in stand.both(*call, causal=causal, window=window):
            assert_close(output, expected)
        with pytest.raises(MetadataError, match=r"\(2, 1\)"):
            stand.run_impl(*call, window=(2, 1))


def test_what_32_bits_cannot_reach_is_refused() -> None:
    fits = torch.empty(1, device="meta").expand(2**25, 1, 128)
    check_offsets(fits)
    far = torch.empty_strided((2**18, 8, 128), (2**14, 128, 1), device="meta")
    check_offsets(far)
    with pytest.raises(MetadataError, match=str(2**32 - 1)):
        check_offsets(torch.empty_strided((2**18 + 1, 8, 128), (2**14, 128, 1), device="meta"))


def test_a_call_that_is_too_large_is_refused_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of its shape, made for another layer or before, is no way around the limit."""
    stand = stand_of("fa2")
    call = call_of(stand, 1, 64, 64)
    with stand.kernels():
        monkeypatch.setattr(flashinfer_shapes, "UINT32_MAX", 1000)  # a small tensor is past it
        for layer in [stand.layer(4, HEAD_SIZE)] * 2 + [stand.layer(4, HEAD_SIZE)]:
            with pytest.raises(MetadataError):
                layer(*call)


def test_views_past_the_limit_are_refused_although_their_shape_has_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = stand_of("fa2")
    call = call_of(stand, 1, 64, 64)
    far = torch.zeros(1, 64, 64, HEAD_SIZE, dtype=stand.dtype)[:, :, :4]  # rows lie far apart
    with stand.kernels(), torch.no_grad():
        layer = stand.layer(4, HEAD_SIZE)
        monkeypatch.setattr(flashinfer_shapes, "UINT32_MAX", call[0].numel())
        layer(*call)
        with pytest.raises(MetadataError):
            layer(far, *call[1:])


def test_a_batch_of_nothing_gives_nothing() -> None:
    stand = stand_of("fa2")
    query, key, value = (x[:0] for x in call_of(stand, 1, 6, 6))
    with stand.kernels(), torch.no_grad():
        assert stand.layer(4, HEAD_SIZE)(query, key, value).shape == query.shape
