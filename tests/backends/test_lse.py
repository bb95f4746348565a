"""forward_with_lse at its edges: no keys, no queries, rows that see nothing, packed sequences, little memory."""

from __future__ import annotations

import pytest
import torch

from omni_attn import AttentionMetadata
from omni_attn.backends import torch_sdpa_impl
from omni_attn.errors import MetadataError
from omni_attn.ops.reference import reference_attention
from omni_attn.products import build_product
from tests.layer.stands import HEAD_SIZE, STANDS, Stand, assert_close, tensors

with_lse = pytest.mark.parametrize("stand", [stand for stand in STANDS if stand.facts.lse], ids=str)


@with_lse
@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_zero_tokens(stand: Stand, queries: int, keys: int, causal: bool) -> None:
    kv_heads = 2 if stand.facts.gqa else 4
    query, key, value = tensors(2, queries, keys, kv_heads=kv_heads)
    with stand.kernels() as log:
        impl, builder = stand.impl(4, HEAD_SIZE, num_kv_heads=kv_heads, causal=causal and stand.facts.causal)
        product = build_product(builder, AttentionMetadata(), (queries, keys))
        output, lse = impl.forward_with_lse(query, key, value, product)
        assert not log.calls
    assert output.shape == (2, queries, 4, HEAD_SIZE) and not output.any() and output.is_contiguous()
    assert lse.shape == (2, 4, queries) and lse.dtype == torch.float32
    assert bool((lse == float("-inf")).all())


@pytest.mark.parametrize(
    "stand", [s for s in STANDS if s.facts.lse and s.facts.causal and s.facts.causal_unequal_lengths], ids=str
)
def test_a_row_without_a_key_among_others(stand: Stand) -> None:
    lengths = stand.tokens(5), stand.tokens(3)
    query, key, value = tensors(2, *lengths)
    with stand.kernels():
        impl, builder = stand.impl(4, HEAD_SIZE, causal=True)
        product = build_product(builder, AttentionMetadata(), lengths)
        output, lse = impl.forward_with_lse(query, key, value, product)
    expected, expected_lse = reference_attention(query, key, value, causal=True)
    assert_close(output, expected)
    assert torch.equal(lse == float("-inf"), expected_lse == float("-inf"))
    assert bool((lse[..., :2] == float("-inf")).all()) and bool(torch.isfinite(lse[..., 2:]).all())


@pytest.mark.parametrize("stand", [s for s in STANDS if s.facts.lse and s.facts.packing], ids=str)
@pytest.mark.parametrize("on_host", [True, False])
def test_packed_sequences(stand: Stand, on_host: bool) -> None:
    """Right, or refused, and what was prepared says so beforehand. The last sequence ends before the tokens do."""
    cu = (0, 2, 2, 5)
    query, key, value = tensors(1, 7, 7)
    record = AttentionMetadata(cu_seqlens_q=cu if on_host else torch.tensor(cu, dtype=torch.int32))
    document = torch.bucketize(torch.arange(7), torch.tensor(cu[1:]), right=True)
    keep = (document[:, None] == document) & (document < 3)
    expected, expected_lse = reference_attention(query, key, value, attn_mask=keep[None, None])
    with stand.kernels():
        impl, builder = stand.impl(4, HEAD_SIZE)
        try:
            product = build_product(builder, record, (7, 7))
        except MetadataError:
            pytest.skip(f"{stand} refuses these boundaries")
        if getattr(product, "without_lse", None) is not None:
            with pytest.raises(MetadataError, match="log-sum-exp") as raised:
                impl.forward_with_lse(query, key, value, product)
            assert stand.name in str(raised.value)
            return
        output, lse = impl.forward_with_lse(query, key, value, product)
    assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask_shape", [None, (2, 5), (1, 4, 6, 5), (2, 1, 6, 5)])
def test_some_rows_at_a_time(
    causal: bool, mask_shape: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of 2 items and 5 keys fit into what TORCH_SDPA may hold."""
    monkeypatch.setattr(torch_sdpa_impl, "MAX_SCORES", 24)
    (stand,) = (stand for stand in STANDS if stand.name == "TORCH_SDPA")
    query, key, value = tensors(2, 6, 5, kv_heads=2)
    mask = None if mask_shape is None else torch.randn(mask_shape, generator=torch.manual_seed(3)) > -0.5
    impl, builder = stand.impl(4, HEAD_SIZE, num_kv_heads=2, causal=causal)
    product = build_product(builder, AttentionMetadata(attn_mask=mask), (6, 5))
    output, lse = impl.forward_with_lse(query, key, value, product)
    expected, expected_lse = reference_attention(query, key, value, attn_mask=mask, causal=causal)
    assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse.float(), atol=1e-5, rtol=0)
