"""fastvideo_kernel in plain torch, as far as benchmarks/fastvideo_peer.py calls it; means are rounded to bfloat16."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from omni_attn.testing.packages import fake_package


@contextmanager
def fastvideo_kernel() -> Iterator[list[tuple[str, str]]]:
    """The stand-in, and a list that its calls fill: the entry, and the switches that were on."""
    calls: list[tuple[str, str]] = []

    def bhsd(query, key, value, sizes, query_sizes, topk, tile, gate):
        calls.append(("bhsd", _switches()))
        assert query.is_contiguous() and gate.is_contiguous() and gate.shape == query.shape
        return _attention(query, key, value, sizes, topk, gate)

    def bshd(query, key, value, sizes, query_sizes, topk, tile, gate):
        calls.append(("bshd", _switches()))
        first = (x.transpose(1, 2) for x in (query, key, value))
        return _attention(*first, sizes, topk, gate.transpose(1, 2)).transpose(1, 2)

    package = fake_package("fastvideo_kernel", video_sparse_attn=bhsd, video_sparse_attn_bshd=bshd)
    with package, fake_package("fastvideo_kernel.ops", fused_topk_mask=_topk_mask):
        yield calls


def _switches() -> str:
    return " ".join(name for name in sorted(os.environ) if "FASTVIDEO" in name and os.environ[name] == "1")


def _topk_mask(scores: torch.Tensor, topk: int) -> torch.Tensor:
    indices = scores.topk(topk).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, True)


def _attention(query, key, value, sizes, topk, gate):
    blocks, size = sizes.numel(), query.shape[2] // sizes.numel()
    means = [
        (x.float().unflatten(2, (blocks, size)).sum(3) / sizes[:, None]).to(x.dtype)
        for x in (query, key, value)
    ]
    scores = means[0] @ means[1].mT / query.shape[-1] ** 0.5
    mask = sys.modules["fastvideo_kernel.ops"].fused_topk_mask(scores, topk)
    valid = (torch.arange(size) < sizes[:, None]).flatten()
    keep = mask.repeat_interleave(size, 2).repeat_interleave(size, 3) & valid
    logits = (query.float() @ key.float().mT / query.shape[-1] ** 0.5).masked_fill(~keep, float("-inf"))
    fine = (logits.softmax(-1) @ value.float()).to(query.dtype)
    coarse = (scores.softmax(-1) @ means[2]).repeat_interleave(size, 2)
    return coarse * gate + fine
