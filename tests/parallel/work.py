"""What the processes of the tests do: one function each, found by its name in the process that runs it."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.errors import ConfigError
from omni_attn.parallel import Parallel, watch
from tests.parallel.processes import device_of
from tests.parallel.scene import SIZE, Call


def attend(
    parallel: Parallel, calls: Sequence[Call], compiled: bool = False, prepared: bool = True
) -> list[Tensor]:
    """This rank's output of each call."""
    return [_Rank(parallel, call, compiled, prepared).output() for call in calls]


def attend_with_a_copy(parallel: Parallel, call: Call) -> Tensor:
    """This rank's output of a copy of the layer, as averages of weights are kept."""
    rank = _Rank(parallel, call, compiled=False, prepared=True)
    rank.called = copy.deepcopy(rank.layer)
    return rank.output()


def differentiate(parallel: Parallel, call: Call, weights: Tensor, compiled: bool = False) -> list[Tensor]:
    """Gradients of this rank's query, key and value, for the sum over all ranks of output times weights."""
    rank = _Rank(parallel, call, compiled, prepared=True)
    for tensor in rank.own:
        tensor.requires_grad_()
    (rank.output() * parallel.split(weights).to(rank.device)).sum().backward()
    return [_gradient(tensor) for tensor in rank.own]


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


class _Rank:
    """One call's layer and its tokens on one rank."""

    def __init__(self, parallel: Parallel, call: Call, compiled: bool, prepared: bool) -> None:
        self.device = device = device_of(parallel)
        here = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in call.fields.items()}
        call = replace(call, fields=here)
        value = {} if call.value_size == SIZE else {"value_head_size": call.value_size}
        with use_attention_config(call.backend, device=device):
            self.layer = Attention(
                call.heads, SIZE, role="self", num_kv_heads=call.kv_heads, **{**value, **call.needs}
            )
        self.called: Any = (
            torch.compile(self.layer, fullgraph=True, backend="aot_eager") if compiled else self.layer
        )
        self.record: AttentionMetadata = call.record()
        if prepared:
            prepare_attention(self.layer, {"self": self.record}, {"self": call.whole_lengths})
        self.own = [parallel.split(tensor).contiguous().to(device) for tensor in call.own]
        self.streams = {name: stream.to(device) for name, stream in call.streams.items()}

    def output(self) -> Tensor:
        output: Tensor = self.called(*self.own, self.record.with_layer_inputs(**self.streams))
        return output


def exchange(parallel: Parallel, tokens: int = 6) -> Tensor:
    """What every rank waits for every other in."""
    own = torch.full((1, parallel.shards(tokens).sizes[parallel.rank]), float(parallel.rank))
    return parallel.gather(own.to(device_of(parallel)), tokens).cpu()


def fail_before(parallel: Parallel, rank: int) -> Tensor:
    """One rank fails while the others wait for it in their first exchange."""
    if parallel.rank == rank:
        raise ValueError(f"rank {rank} has had enough")
    return exchange(parallel)


def fail_between(parallel: Parallel, rank: int) -> Tensor:
    """One rank fails after exchanges that all came through, while others are on their way to the next."""
    exchange(parallel)
    if parallel.rank == rank:
        raise ValueError(f"rank {rank} has had enough")
    return exchange(parallel)


def fail_inside(parallel: Parallel, rank: int) -> Tensor:
    """One rank fails in the exchange itself, whose backend refuses what it sends."""
    exchange(parallel)
    sent = torch.ones(1, 3, device=device_of(parallel))
    return parallel.gather(sent.to_sparse() if parallel.rank == rank else sent, 6)


def fail_late(parallel: Parallel, rank: int) -> None:
    """One rank fails when the others are through."""
    if parallel.rank == rank:
        time.sleep(0.6)
        raise ConfigError(f"rank {rank} has no room for its output: free some")


def fail_alike(parallel: Parallel) -> None:
    """All ranks meet the same error."""
    raise ConfigError("all ranks read the same wrong file: correct it")


def leave(parallel: Parallel, rank: int) -> Tensor:
    """One rank ends without a word while the others wait for it."""
    exchange(parallel)
    if parallel.rank == rank:
        os._exit(7)
    return exchange(parallel)


def stay_busy(parallel: Parallel, rank: int) -> None:
    """One rank fails, and the others are busy with what no exchange interrupts."""
    watch.FREED_WITHIN = 0.5
    if parallel.rank == rank:
        raise ConfigError(f"rank {rank} has had enough")
    time.sleep(60)


def hang(parallel: Parallel, rank: int) -> Tensor:
    """One rank never comes to the exchange."""
    watch.FREED_WITHIN = 0.5
    if parallel.rank == rank:
        time.sleep(200)
    return exchange(parallel)


def come_through_slowly(parallel: Parallel) -> str:
    """One rank takes longer than ranks wait for one another, alive all the while."""
    time.sleep(2.5 * (parallel.rank == 0))
    return "through"
