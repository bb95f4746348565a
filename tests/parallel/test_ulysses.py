"""Ulysses equals one rank: any heads, any lengths, masks, packing, joint streams, gradients."""

from __future__ import annotations

import pytest
import torch

from omni_attn import Attention, AttentionMetadata, use_attention_config
from omni_attn.parallel import Parallel
from omni_attn.testing import fake_ranks


@pytest.mark.parametrize("heads", [(4, 4), (28, 7), (30, 30), (8, 2), (5, 1), (3, 3)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("length", [1, 7, 8])
def test_any_heads_and_lengths(heads: tuple[int, int], ranks: int, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, length, heads[0], 8, generator=generator)
    key, value = (torch.randn(2, length, heads[1], 8, generator=generator) for _ in range(2))
    with use_attention_config("TORCH_SDPA", device="cpu"):
        alone = Attention(heads[0], 8, role="self", num_kv_heads=heads[1])(query, key, value)

    def work(parallel: Parallel) -> torch.Tensor:
        with use_attention_config("TORCH_SDPA", device="cpu"):
            layer = Attention(heads[0], 8, role="self", num_kv_heads=heads[1])
        return layer(*(parallel.split(tensor) for tensor in (query, key, value)), AttentionMetadata())

    together = torch.cat(fake_ranks({"ulysses_degree": ranks}, work), dim=1)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
