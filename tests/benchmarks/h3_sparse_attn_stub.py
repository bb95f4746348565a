"""h3_sparse_attn in plain torch, as far as benchmarks/block_summary.py calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from omni_attn.testing.packages import fake_package


@contextmanager
def h3_sparse_attn(*, forgets: bool = False) -> Iterator[list[int]]:
    """The stand-in, and a list that its calls fill with their number of selected blocks.

    Args:
        forgets: it leaves out what was not selected, which is another method.
    """
    calls: list[int] = []

    def sparse_attention(query, key, value, top_k, block_size, taylor):
        assert taylor
        calls.append(top_k)
        query, key, value = (x.double().transpose(1, 2) for x in (query, key, value))
        counts = torch.tensor([len(part) for part in torch.arange(key.shape[2]).split(block_size)])
        means = [
            torch.stack([part.mean(2) for part in x.split(block_size, 2)], 2) for x in (query, key, value)
        ]
        chosen = torch.zeros(*means[0].shape[:3], len(counts), dtype=torch.bool)
        chosen.scatter_(-1, _best(means[0], means[1], top_k), True)
        rows = chosen.repeat_interleave(block_size, 2)[:, :, : query.shape[2]]
        fine = (query @ key.mT).masked_fill(
            ~rows.repeat_interleave(block_size, 3)[..., : key.shape[2]], -torch.inf
        )
        scale = query.shape[-1] ** -0.5
        coarse = (query @ means[1].mT * scale + counts.log()).masked_fill(rows | forgets, -torch.inf)
        weights = torch.cat([fine * scale, coarse], -1).softmax(-1)
        return (weights @ torch.cat([value, means[2]], 2)).transpose(1, 2).bfloat16()

    def route(query, key, value, top_k, block_size):
        means = [
            torch.stack([part.double().mean(1) for part in x.split(block_size, 1)], 2) for x in (query, key)
        ]
        return None, None, _best(*means, top_k).int(), None

    package = fake_package("h3_sparse_attn")
    kernels = fake_package("h3_sparse_attn.triton_attn", sparse_attention=sparse_attention)
    with package, kernels, fake_package("h3_sparse_attn.routing", route=route):
        yield calls


def _best(query_means: torch.Tensor, key_means: torch.Tensor, top_k: int) -> torch.Tensor:
    return (query_means @ key_means.mT).topk(top_k).indices
