"""Public faults, group G5: layout, causal alignment, grouped heads, short and unequal lengths. B32, B34, B35, B37.

Each recipe runs on every registered backend, through the impl in float32 and through a layer.

B37 with the options of a backend is beside that backend: tests/backends/test_sage_attn.py, whose stand-ins give NaN
below one block, and tests/backends/test_trtllm_options.py, with k_block_size=16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from omni_attn import AttentionMetadata, PackedPadding
from omni_attn.ops.reference import reference_attention
from tests.layer.stands import HEAD_SIZE, Stand, assert_close, every_stand, refusal_of, tensors

SHORT = (1, 14, 15, 16, 17, 127, 128, 129)


# -- B32: the layout


@every_stand
@pytest.mark.parametrize(("tokens", "heads"), [(4, 4), (5, 3)])
def test_b32_tokens_and_heads_are_not_swapped(stand: Stand, tokens: int, heads: int) -> None:
    call = tensors(1, tokens, tokens, heads=heads)
    expected = reference_attention(*call)[0]
    if tokens == heads:
        swapped = reference_attention(*(x.transpose(1, 2) for x in call))[0].transpose(1, 2)
        assert (swapped - expected).abs().max() > 0.5  # nothing fails by shape, but the answer would
    with stand.kernels():
        for output in stand.both(*call):
            assert_close(output, expected)
            assert output.shape == (1, tokens, heads, HEAD_SIZE)
            assert output.stride() == (tokens * heads * HEAD_SIZE, heads * HEAD_SIZE, HEAD_SIZE, 1)


@every_stand
def test_b32_strided_inputs(stand: Stand) -> None:
    """Slices of one fused projection, and tensors that are contiguous in another order, with every last stride."""
    tokens = stand.tokens(5)
    fused = torch.stack(stand.call(2, tokens, tokens), dim=2)
    before, parts = fused.clone(), fused.unbind(2)
    orders = ([x.transpose(1, n).contiguous().transpose(1, n) for x in parts] for n in (2, 3))
    doubled = [x.repeat_interleave(2, dim=-1)[..., ::2] for x in parts]
    for call in (parts, *orders, doubled):
        with stand.kernels():
            output = stand.run_layer(*call)
        assert_close(output, reference_attention(*call)[0])
        assert output.is_contiguous()
    assert torch.equal(fused, before)


@every_stand
@pytest.mark.parametrize(
    "fields",
    [
        {"attn_mask": torch.tensor([[True, False, True, True, False]])},
        {"cu_seqlens_q": (0, 2, 5)},
        {"cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32)},
    ],
    ids=["mask", "host boundaries", "boundaries"],
)
def test_b32_a_strided_last_dimension_of_masked_and_packed_calls(
    stand: Stand, fields: dict[str, torch.Tensor]
) -> None:
    call = tensors(1, 5, 5)
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in call]
    assert all(x.stride(-1) != 1 for x in strided)
    with stand.kernels():
        outputs, expected = (stand.both(*given, AttentionMetadata(**fields)) for given in (strided, call))
    for one, other in zip(outputs, expected, strict=True):
        assert_close(one, other.double())
        assert one.is_contiguous()


# -- B34: causal is aligned at the bottom right


@every_stand
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3), (4, 4)])
def test_b34_one_alignment(stand: Stand, queries: int, keys: int) -> None:
    call = tensors(1, queries, keys)
    expected = reference_attention(*call, causal=True)[0]
    if queries > keys:
        assert not expected[:, : queries - keys].any()  # queries before the first key see nothing
    with stand.kernels():
        for output in stand.both(*call, causal=True):
            assert_close(output, expected)


@every_stand
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3), (5, 5)])
def test_b34_with_key_padding(stand: Stand, queries: int, keys: int) -> None:
    call = tensors(2, queries, keys)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)[:, :keys]
    record = AttentionMetadata(attn_mask=mask)
    with stand.kernels():
        expected = reference_attention(*call, attn_mask=mask, causal=True)[0]
        for output in stand.both(*call, record, causal=True):
            assert_close(output, expected)
        if not (stand.facts.causal and stand.facts.causal_with_mask):
            text = refusal_of(lambda: stand.layer(4, HEAD_SIZE, causal=True, mask_usage="padding"))
            assert stand.name in text and ("causal" in text or "attn_mask" in text)


@every_stand
@pytest.mark.parametrize("window", [(2, 1), (1, -1), (0, 0)])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 7), (7, 3)])
def test_b34_windows_have_the_same_alignment(
    stand: Stand, queries: int, keys: int, window: tuple[int, int]
) -> None:
    call = tensors(1, queries, keys)
    with stand.kernels():
        for causal in (False, True):
            expected = reference_attention(*call, causal=causal, window=window)[0]
            for output in stand.both(*call, causal=causal, window=window):
                assert_close(output, expected)


# -- B35: grouped heads


@every_stand
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_b35_heads_repeat_interleaved(stand: Stand, kv_heads: int, masked: bool) -> None:
    call = tensors(2, 5, 7, heads=8, kv_heads=kv_heads)
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool) if masked else None
    with stand.kernels():
        for output in stand.both(*call, AttentionMetadata(attn_mask=mask)):
            assert_close(output, reference_attention(*call, attn_mask=mask)[0])


@every_stand
def test_b35_counts_that_do_not_divide(stand: Stand) -> None:
    with stand.kernels(), pytest.raises(ValueError, match=r"8.*3"):
        stand.layer(8, HEAD_SIZE, num_kv_heads=3)


@every_stand
def test_b35_other_heads_than_declared(stand: Stand) -> None:
    with stand.kernels() as log:
        declared = 2 if stand.facts.gqa else 8
        layer = stand.layer(8, HEAD_SIZE, num_kv_heads=declared)
        call = (x.to(stand.dtype) for x in tensors(1, 5, 5, heads=8, kv_heads=4))
        text = refusal_of(lambda: layer(*call))
        assert not getattr(log, "calls", [])
    assert f"{declared} heads" in text and f"(1, 5, 4, {HEAD_SIZE})" in text


# -- B37: short and unequal lengths


@every_stand
@pytest.mark.parametrize("queries", SHORT)
def test_b37_lengths_around_a_block(stand: Stand, queries: int) -> None:
    for keys in SHORT:
        call = tensors(1, queries, keys, heads=2)
        expected = reference_attention(*call)[0]
        with stand.kernels():
            for output in stand.both(*call):
                assert_close(output, expected)
            limits = stand.limits(*call)
            if limits.must:  # also where only hints tell the lengths
                hints = {"max_seqlen_q": queries, "max_seqlen_k": keys}
                stand.refuses(partial(stand.layer, 2, HEAD_SIZE, **hints), limits)


@every_stand
@pytest.mark.parametrize(
    "fields",
    [
        {"cu_seqlens_q": (0, 2), "cu_seqlens_k": (0, 1)},
        {"cu_seqlens_q": (0, 4), "cu_seqlens_k": (0, 4)},
        {"packed_padding": True},
        {"attn_mask": True},
        {"attn_mask": True, "kv_lengths": (1,)},
    ],
    ids=["first sequence", "last sequence", "packed_padding", "mask", "kv_lengths"],
)
def test_b37_one_key_inside_a_longer_call(stand: Stand, fields: dict[str, Any]) -> None:
    """A kernel that needs more keys than one part of the call has must not be handed that part."""
    tokens = max(stand.lengths(5, 5))
    call = tensors(1, tokens, tokens)
    if "cu_seqlens_q" in fields:
        stated = {name: (*boundaries, tokens) for name, boundaries in fields.items()}
        expected = torch.zeros(1, tokens, 4, HEAD_SIZE, dtype=torch.float64)
        for rows, keys in zip(*(map(slice, cu, cu[1:]) for cu in stated.values()), strict=True):
            expected[:, rows] = reference_attention(call[0][:, rows], call[1][:, keys], call[2][:, keys])[0]
    else:
        one_key = torch.arange(tokens)[None] < 1
        values = {"packed_padding": PackedPadding(tokens, 1), "attn_mask": one_key, "kv_lengths": (1,)}
        stated = {name: values[name] for name in fields}
        expected = reference_attention(call[0], call[1][:, :1], call[2][:, :1])[0]
    with stand.kernels():
        for output in stand.both(*call, AttentionMetadata(**stated)):
            assert_close(output, expected)


@every_stand
@pytest.mark.parametrize("batch", [1, 2])
def test_b37_no_keys_and_no_queries(stand: Stand, batch: int) -> None:
    with stand.kernels():
        for output in stand.both(*tensors(batch, 5, 0)):
            assert output.shape == (batch, 5, 4, HEAD_SIZE) and not output.any()
        for output in stand.both(*tensors(batch, 0, 5)):
            assert output.shape == (batch, 0, 4, HEAD_SIZE)
