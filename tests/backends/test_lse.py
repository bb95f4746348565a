"""forward_with_lse at its edges: no keys, no queries, and records whose rows see nothing."""

from __future__ import annotations

import pytest
import torch

from omni_attn import AttentionMetadata
from omni_attn.ops.reference import reference_attention
from omni_attn.products import build_product
from tests.layer.stands import STANDS, Stand, assert_close, tensors

with_lse = pytest.mark.parametrize("stand", [stand for stand in STANDS if stand.facts.lse], ids=str)


@with_lse
@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_zero_tokens(stand: Stand, queries: int, keys: int, causal: bool) -> None:
    query, key, value = tensors(2, queries, keys, kv_heads=2)
    with stand.kernels() as log:
        impl, builder = stand.impl(4, 8, num_kv_heads=2, causal=causal)
        product = build_product(builder, AttentionMetadata(), (queries, keys))
        output, lse = impl.forward_with_lse(query, key, value, product)
        assert not log.calls
    assert output.shape == (2, queries, 4, 8) and not output.any() and output.is_contiguous()
    assert lse.shape == (2, 4, queries) and lse.dtype == torch.float32
    assert bool((lse == float("-inf")).all())


@with_lse
def test_a_row_without_a_key_among_others(stand: Stand) -> None:
    query, key, value = tensors(2, 5, 3)
    with stand.kernels():
        impl, builder = stand.impl(4, 8, causal=True)
        product = build_product(builder, AttentionMetadata(), (5, 3))
        output, lse = impl.forward_with_lse(query, key, value, product)
    expected, expected_lse = reference_attention(query, key, value, causal=True)
    assert_close(output, expected)
    assert torch.equal(lse == float("-inf"), expected_lse == float("-inf"))
    assert bool((lse[..., :2] == float("-inf")).all()) and bool(torch.isfinite(lse[..., 2:]).all())
