"""What splitting one attention call over ranks costs: bytes sent, seconds, efficiency. Arithmetic, nothing is run.

Only the forward pass, the busiest rank, and tensors whose tokens are split evenly. Exchanges of Ulysses and of gathered
keys and values stand before or behind the kernel; those of a ring, and of heads in pieces, run beside it. Legend of
names: *_bytes are bytes of one rank, *_seconds times of the slowest one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from omni_attn.config.parallel import ParallelConfig
from omni_attn.parallel.heads import split_heads
from omni_attn.parallel.machines import Machine
from omni_attn.parallel.shards import Shards


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Self-attention of a whole sequence, before it is split.

    Attributes:
        tokens, heads, head_size, batch: of query, key and value.
        kv_heads: of key and value, None = heads.
        causal: half of the pairs of tokens are computed.
        kept: share of the pairs that a sparse backend computes.
        beside_query: tensors as large as the query that travel with it, a gate for example.
        element_bytes: of one number.
    """

    tokens: int
    heads: int
    head_size: int
    batch: int = 1
    kv_heads: int | None = None
    causal: bool = False
    kept: float = 1.0
    beside_query: int = 0
    element_bytes: int = 2

    @property
    def key_heads(self) -> int:
        """Of key and of value."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def bytes_of(self, tokens: int, heads: int) -> int:
        """A tensor of so many tokens and heads."""
        return self.batch * tokens * heads * self.head_size * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One call on each of `ranks` ranks.

    Attributes:
        degrees: of the configuration, in words.
        sent_bytes: what the busiest rank sends to others.
        compute_seconds: its kernels.
        copy_seconds: bringing tensors into the order of an exchange and back, and merging partial outputs.
        exchange_seconds: all its exchanges, one after the other.
        exposed_seconds: the part of them that no kernel hides, and what they take from a kernel beside them.
        one_rank_seconds: the whole call without ranks.
    """

    degrees: str
    ranks: int
    sent_bytes: int
    compute_seconds: float
    copy_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    one_rank_seconds: float

    @property
    def seconds(self) -> float:
        """The call."""
        return self.compute_seconds + self.copy_seconds + self.exposed_seconds

    @property
    def speedup(self) -> float:
        """Times as fast as one rank."""
        return self.one_rank_seconds / self.seconds

    @property
    def efficiency(self) -> float:
        """Speedup for each rank."""
        return self.speedup / self.ranks


def predict(call: AttentionCall, config: ParallelConfig, machine: Machine) -> Prediction:
    """The cost of a call under a configuration.

    Raises:
        ConfigError: the heads are not to be split unevenly, and would have to be.
    """
    if config.allgather_degree > 1:
        return _gathered(call, config, machine)
    return _traded_and_passed(call, config, machine)


def calibrated(machine: Machine, call: AttentionCall, seconds: float) -> Machine:
    """The machine, with the rate at which this call takes so many seconds on one rank."""
    predicted = _one_rank_seconds(call, machine)
    return replace(machine, attention_flops=machine.attention_flops * predicted / seconds)


def kernel_seconds(call: AttentionCall, machine: Machine, queries: int, keys: float, heads: int) -> float:
    """Attention of so many queries to so many keys each, in whole rounds of tiles on all processors."""
    tiles = call.batch * heads * math.ceil(queries / machine.tile_rows)
    if not tiles:
        return 0.0
    flops = 4 * machine.tile_rows * (keys * call.kept + machine.tile_start) * call.head_size
    rounds = math.ceil(tiles / machine.processors)
    return machine.launch + rounds * flops * machine.processors / machine.attention_flops


def predict_step(
    attention: Prediction, machine: Machine, *, layers: int, rest_seconds: float, gathered_bytes: int
) -> Prediction:
    """A forward of a model whose layers all make this call.

    Args:
        attention: of one layer's call.
        layers: of the model.
        rest_seconds: everything else on one rank; it works token by token, so that ranks share it.
        gathered_bytes: the whole output, of which each rank sends its piece to the others at the end.
    """
    piece = gathered_bytes / attention.ranks
    gather = _all_gather_seconds(piece, attention.ranks, machine)
    return replace(
        attention,
        sent_bytes=layers * attention.sent_bytes + round((attention.ranks - 1) * piece),
        compute_seconds=layers * attention.compute_seconds + rest_seconds / attention.ranks,
        copy_seconds=layers * attention.copy_seconds,
        exchange_seconds=layers * attention.exchange_seconds + gather,
        exposed_seconds=layers * attention.exposed_seconds + gather,
        one_rank_seconds=layers * attention.one_rank_seconds + rest_seconds,
    )


def _keys_seen(call: AttentionCall) -> float:
    return call.tokens / 2 if call.causal else call.tokens


def _one_rank_seconds(call: AttentionCall, machine: Machine) -> float:
    return kernel_seconds(call, machine, call.tokens, _keys_seen(call), call.heads)


def _traded_and_passed(call: AttentionCall, config: ParallelConfig, machine: Machine) -> Prediction:
    """Ulysses around a ring; either may have one rank."""
    traders, rounds = config.ulysses_degree, config.ring_degree
    shards = Shards.even(call.tokens, config.size)
    split = split_heads(call.heads, call.key_heads, traders, role="predicted", uneven=config.uneven_heads)
    counts = [split.counts(rank) for rank in range(traders)]
    heads, key_heads = max(first for first, _ in counts), max(second for _, second in counts)
    sizes, queries = shards.sizes[:traders], shards.joined(traders).sizes[0]
    # Of query, key, value and what travels with the query.
    sent_heads = [(1 + call.beside_query) * first + 2 * second for first, second in counts]

    pieces = len(split.cut(config.head_pieces))
    memory = config.symmetric_memory
    wires, ring_wires = machine.wires(traders, memory), machine.wires(config.size, memory)
    compute = pieces * kernel_seconds(
        call, machine, queries, _keys_seen(call) if rounds == 1 else queries, heads // pieces
    )
    sent, copied, launches, exchanged = 0, 0.0, 0, 0.0
    if traders > 1:
        there = [[call.bytes_of(size, width) for width in sent_heads] for size in sizes]
        back = [[call.bytes_of(size, first) for size in sizes] for first, _ in counts]
        for matrix in (there, back):
            sent += max(sum(row) - row[rank] for rank, row in enumerate(matrix))
            exchanged += pieces * machine.all_to_all_seconds(
                [[count // pieces for count in row] for row in matrix], wires
            )
        output = call.bytes_of(sizes[0], call.heads)
        copied += 2 * (call.bytes_of(sizes[0], sum(sent_heads)) + (1 + wires.staged) * output)
        runs = len(set(counts))  # of ranks with as many heads, which one copy serves
        # Pieces of heads do not follow one another in the tensors of a rank, nor parcels that others read.
        is_whole = pieces == 1 and not wires.staged
        launches += (runs if is_whole else traders * pieces) * (3 + call.beside_query) + 1
    # The first piece has nothing to hide behind on its way there, and the last one on its way back.
    open_share, hiding = exchanged / pieces, (pieces - 1) / pieces
    exposed = open_share + hiding * max(wires.hindrance * exchanged, exchanged - compute)
    if rounds > 1:
        if call.causal:  # the own shard is a triangle
            compute = kernel_seconds(call, machine, queries, queries / 2, heads)
        # The last rank of a causal ring computes every round, and all ranks wait for it.
        other = kernel_seconds(call, machine, queries, queries, heads)
        passed = 2 * call.bytes_of(queries, key_heads)
        shift = machine.shift_seconds(passed, config.size, ring_wires)
        exchanged += (rounds - 1) * shift
        beside = [compute] + (rounds - 2) * [other]
        exposed += sum(max(ring_wires.hindrance * shift, shift - kernel) for kernel in beside)
        compute += (rounds - 1) * other
        sent += (rounds - 1) * passed
        # What is passed on lies ready already, where nobody reads it: it was received in a tensor of its own.
        copied += 2 * passed * (1 + (rounds - 2) * ring_wires.staged)
        copied += _merge_bytes(call, queries, heads, rounds)
        launches += rounds + 1
    return Prediction(
        degrees=config.describe() + (f", {pieces} pieces" if pieces > 1 else ""),
        ranks=config.size,
        sent_bytes=sent,
        compute_seconds=compute,
        copy_seconds=copied / machine.copy + launches * machine.launch,
        exchange_seconds=exchanged,
        exposed_seconds=exposed,
        one_rank_seconds=_one_rank_seconds(call, machine),
    )


def _gathered(call: AttentionCall, config: ParallelConfig, machine: Machine) -> Prediction:
    """All keys and values on every rank."""
    ranks, queries = config.allgather_degree, math.ceil(call.tokens / config.allgather_degree)
    piece = 2 * call.bytes_of(queries, call.key_heads)
    exchanged = _all_gather_seconds(piece, ranks, machine)
    copied, launches = 2 * piece, 2
    if call.tokens % ranks:  # pieces of unequal length are padded, and cut again where they arrive
        copied, launches = copied + 2 * piece + 4 * call.bytes_of(call.tokens, call.key_heads), 4
    seen = call.tokens - queries / 2 if call.causal else call.tokens  # by the last rank
    return Prediction(
        degrees=config.describe(),
        ranks=ranks,
        sent_bytes=(ranks - 1) * piece,
        compute_seconds=kernel_seconds(call, machine, queries, seen, call.heads),
        copy_seconds=copied / machine.copy + launches * machine.launch,
        exchange_seconds=exchanged,
        exposed_seconds=exchanged,
        one_rank_seconds=_one_rank_seconds(call, machine),
    )


def _all_gather_seconds(piece: float, ranks: int, machine: Machine) -> float:
    """Each rank's piece, in bytes, to all: sent once into every host, and then from rank to rank in it."""
    near = min(ranks, machine.ranks_per_host)
    wires = [
        (ranks - 1) * piece / machine.collectives.exchange,
        (ranks - near) / near * piece / machine.network,
    ]
    return max(wires) + (machine.collectives.latency if near == ranks else machine.network_latency)


def _merge_bytes(call: AttentionCall, queries: int, heads: int, rounds: int) -> int:
    """Two partial outputs into one; of more, those in between are kept in float32."""
    own, kept = call.bytes_of(queries, heads), 4 * call.bytes_of(queries, heads) // call.element_bytes
    if rounds == 2:
        return 3 * own
    return (2 * own + kept) + (rounds - 3) * (own + 2 * kept) + (2 * own + kept)
