"""What the processes of the tests do: one function each, found by its name in the process that runs it."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.errors import ConfigError
from omni_attn.parallel import Parallel, use_parallel, watch
from omni_attn.parallel.collectives import Collectives
from omni_attn.parallel.peers import PeerCollectives
from omni_attn.parallel.process_group import GroupCollectives
from omni_attn.parallel.sharing import why_not
from omni_attn.parallel.symmetric import SymmetricMemory
from tests.parallel.processes import device_of
from tests.parallel.scene import SIZE, Call

AGAIN_AND_AGAIN = [Call(length, heads=12, batch=1) for length in (4096, 700, 3001)]


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
        if compiled:  # a process has compiled such a layer before, and may do so a few times only
            torch.compiler.reset()
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


def replay(parallel: Parallel) -> list[Tensor]:
    """Three outputs of a captured call, for inputs that follow one another in its tensors."""
    rank = _Rank(parallel, Call(12, heads=6), compiled=False, prepared=True)
    found, graph = [], torch.cuda.CUDAGraph()
    with torch.cuda.device(rank.device), torch.inference_mode():
        rank.output()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = rank.output()
        for _ in range(3):
            graph.replay()
            found.append(captured.clone())
            rank.output()  # and one beside it, through the same memory
            for tensor in rank.own:
                tensor.mul_(0.5)
    return found


def attend_again_and_again(parallel: Parallel) -> list[Tensor]:
    """Outputs of AGAIN_AND_AGAIN, each as often as it is there with its inputs halved, on two streams in turn."""
    ranks = [_Rank(parallel, call, compiled=False, prepared=True) for call in AGAIN_AND_AGAIN]
    streams, found = [torch.cuda.Stream(device_of(parallel)) for _ in range(2)], []
    with torch.inference_mode():
        for turn in range(4 * len(ranks)):
            rank, stream = ranks[turn % len(ranks)], streams[turn % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(rank.output())
            torch.cuda.current_stream().wait_stream(stream)
            for tensor in rank.own:
                tensor.mul_(0.5)
    return found


def compile_where_memory_could_be_shared(parallel: Parallel, call: Call, weights: Tensor) -> list[Tensor]:
    """Output and gradients of a compiled layer, without a use of memory."""

    class NoMemory:
        def take(self, size: int) -> NoReturn:
            raise AssertionError("compiled code and gradients go another way")

    def own(group: Collectives) -> Collectives:
        return PeerCollectives(group, NoMemory()) if group.size > 1 else group

    through = replace(parallel, ulysses=own(parallel.ulysses), ring=own(parallel.ring))
    with use_parallel(through):
        return [*attend(through, [call], True), *differentiate(through, call, weights, True)]


def on_one_gpu(parallel: Parallel, work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` gives for processes that gloo connects and that share one GPU, and exchange through its memory."""
    # Tensors of one GPU stand for those of several.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0)

    def own(group: Collectives) -> Collectives:
        if not isinstance(group, GroupCollectives):
            return group
        reason = why_not(group.group, device)
        assert not reason, reason
        return PeerCollectives(group, SymmetricMemory(group.group, device, timeout_seconds=30))

    through = replace(parallel, ulysses=own(parallel.ulysses), ring=own(parallel.ring))
    with use_parallel(through):
        return work(through, *arguments)


def way(parallel: Parallel) -> str:
    """How exchanges travel."""
    return (parallel.ulysses if parallel.ulysses.size > 1 else parallel.ring).way


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


def fail_before_attention(parallel: Parallel, rank: int) -> list[Tensor]:
    """One rank fails while the others wait for it in the exchange of a layer, of which there was one before."""
    watch.FREED_WITHIN = 0.5
    attend(parallel, [Call()])
    if parallel.rank == rank:
        raise ValueError(f"rank {rank} has had enough")
    return attend(parallel, [Call()])


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
