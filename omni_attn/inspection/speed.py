"""How fast a captured call is beside dense attention on the same tensors: measured, and by counting pairs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.inspection.capture import CapturedCall
from omni_attn.layer import Attention
from omni_attn.models.runtime import Progress, no_progress
from omni_attn.ops.block_sparse.selection import BlockSelection, token_pairs
from omni_attn.platforms import OmniPlatform
from omni_attn.tuning.cases import case_of_request
from omni_attn.tuning.clocks import clock_for, method_of


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Times of the call and of dense attention.

    Attributes:
        dense: label of the dense backend: the platform's default for this layer.
        dense_ms, sparse_ms: medians of the rounds, which alternate.
        rounds: how many.
        method: how they were timed, in words.
        predicted: dense pairs / (computed pairs + what selecting costs).
    """

    dense: str
    dense_ms: float
    sparse_ms: float
    rounds: int
    method: str
    predicted: float

    @property
    def measured(self) -> float:
        """Dense time over sparse time."""
        return self.dense_ms / self.sparse_ms


def predicted_speedup(selection: BlockSelection) -> float:
    """Pairs of dense attention over the pairs that are computed, all heads together.

    A pair of tokens is two products, query by key and weight by value. Scoring a pair of blocks by their means is one
    product, so half a pair; a coarse term needs both. With summaries, the means of all key blocks pass by each query
    token.
    """
    queries, keys = selection.query_blocks, selection.key_blocks
    pairs = token_pairs(selection)
    coarse = queries.num_blocks * keys.num_blocks * (0.5 if selection.coarse is None else 1.0)
    if selection.summaries:
        coarse += queries.tokens * keys.num_blocks
    dense = queries.tokens * keys.tokens * pairs.numel()
    return dense / (int(pairs.sum()) + coarse * pairs.numel())


def dense_layer(call: CapturedCall, platform: OmniPlatform) -> Attention:
    """The platform's default for the captured layer: exact and dense."""
    request = replace(
        call.layer.request,
        dtype=str(call.query.dtype),
        max_seqlen_q=call.query.shape[1],
        max_seqlen_k=call.key.shape[1],
    )
    return case_of_request(request).layer(None, platform)


def tokens_in_use(
    call: CapturedCall, selection: BlockSelection
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value without the padding behind them, of which dense attention must not know."""
    queries, keys = selection.query_blocks.tokens, selection.key_blocks.tokens
    return call.query[:, :queries], call.key[:, :keys], call.value[:, :keys]


def measure_speed(
    call: CapturedCall,
    dense: Attention,
    selection: BlockSelection,
    *,
    rounds: int,
    progress: Progress = no_progress,
) -> Speed:
    """Times both on the captured tensors; the first call of each, which may compile, is not timed."""
    tensors = (call.query, call.key, call.value)
    plain = AttentionMetadata()
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "dense": partial(dense, *tokens_in_use(call, selection), plain),
        "sparse": partial(call.layer, *tensors, call.record),
    }
    device = call.query.device
    clock = clock_for(device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in calls.values():
        run()
    for _ in progress(range(rounds), rounds, "timing"):
        for name, run in calls.items():
            times[name].append(clock.milliseconds(run))
    assert dense.selection is not None
    return Speed(
        dense=dense.selection.label,
        dense_ms=statistics.median(times["dense"]),
        sparse_ms=statistics.median(times["sparse"]),
        rounds=rounds,
        method=method_of(device),
        predicted=predicted_speedup(selection),
    )
