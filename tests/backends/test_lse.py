"""forward_with_lse at its edges: no keys, no queries, and records whose rows see nothing."""

from __future__ import annotations

import pytest
import torch

from omni_attn import AttentionMetadata
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
