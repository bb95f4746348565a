"""The cost model against what two GPUs measured, against the bytes that ranks really send, and in its limits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from omni_attn import Attention, AttentionMetadata, prepare_attention, use_attention_config
from omni_attn.config import ParallelConfig
from omni_attn.errors import ConfigError
from omni_attn.parallel import Parallel, use_parallel
from omni_attn.parallel.collectives import Pending
from omni_attn.parallel.cost import AttentionCall, calibrated, kernel_seconds, predict, predict_step
from omni_attn.parallel.machines import H200
from omni_attn.parallel.outbox import Rows
from omni_attn.testing import fake_ranks
from tests.parallel.counted import PassedOn

WAN = AttentionCall(tokens=75600, heads=40, head_size=128)


def split(**degrees: int) -> ParallelConfig:
    return ParallelConfig.model_validate(degrees)


def test_imports_no_torch() -> None:
    code = "import sys, omni_attn.parallel.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_two_gpus_measured() -> None:
    """176.2 ms on one GPU, 86.1 on half the heads; NCCL trades a tensor in 0.76 ms, and shifts it in 1.27."""
    assert kernel_seconds(WAN, H200, 75600, 75600, 40) == pytest.approx(176.2e-3, rel=0.01)
    assert kernel_seconds(WAN, H200, 75600, 75600, 20) == pytest.approx(86.1e-3, rel=0.04)
    trade = predict(WAN, ParallelConfig(ulysses_degree=2, symmetric_memory=False), H200)
    assert trade.exchange_seconds == pytest.approx(4 * 0.76e-3, rel=0.03)
    assert trade.seconds == pytest.approx(89.2e-3 + trade.copy_seconds, rel=0.03)
    ring = predict(WAN, ParallelConfig(ring_degree=2, symmetric_memory=False), H200)
    assert ring.exchange_seconds == pytest.approx(2 * 1.27e-3, rel=0.03)
    assert ring.exposed_seconds == pytest.approx(ring.exchange_seconds)


@pytest.mark.parametrize(
    ("kept", "gated", "pieces", "alone", "times"),
    [(1.0, False, 2, 170.659, 1.950), (0.1, True, 2, 18.788, 1.521), (0.1, False, 4, 18.545, 1.607)],
)
def test_what_two_gpus_measured_through_memory(
    kept: float, gated: bool, pieces: int, alone: float, times: float
) -> None:
    call = replace(WAN, kept=kept, beside_query=int(gated))
    found = predict(
        call, ParallelConfig(ulysses_degree=2, head_pieces=pieces), calibrated(H200, call, alone / 1e3)
    )
    assert found.speedup == pytest.approx(times, rel=0.02)


def test_memory_is_shared_within_a_host_alone() -> None:
    within, across = ParallelConfig(ulysses_degree=8), ParallelConfig(ulysses_degree=16)
    for config, saves in ((within, True), (across, False)):
        by_nccl = predict(WAN, config.model_copy(update={"symmetric_memory": False}), H200)
        assert (predict(WAN, config, H200).exchange_seconds < by_nccl.exchange_seconds) is saves
    # A ring across hosts around Ulysses groups within them.
    both = ParallelConfig(ulysses_degree=8, ring_degree=8)
    without = predict(WAN, both.model_copy(update={"symmetric_memory": False}), H200)
    assert predict(WAN, both, H200).exchange_seconds < without.exchange_seconds
    assert predict(WAN, both, H200).copy_seconds > without.copy_seconds


@pytest.mark.parametrize(
    ("tokens", "keys", "heads", "tflops"),
    [(4608, 4608, 24, 697), (32760, 32760, 12, 745), (32760, 512, 40, 611), (27280, 27280, 24, 750)],
)
def test_one_rate_explains_shapes_of_many_sizes(tokens: int, keys: int, heads: int, tflops: float) -> None:
    """What FlashAttention 3 reached on an H200 with the caches flushed, by the rate of calls of some milliseconds."""
    call, machine = replace(WAN, tokens=tokens, heads=heads), replace(H200, attention_flops=768e12, launch=0)
    seconds = kernel_seconds(call, machine, tokens, keys, heads)
    assert 4 * tokens * keys * heads * 128 / seconds == pytest.approx(tflops * 1e12, rel=0.03)


class Counting(PassedOn):
    """Counts the bytes that leave this rank."""

    sent = 0

    def start_all_to_all(self, outbox: Rows) -> Pending:
        rows, (send, *_) = outbox
        row = rows.element_size() * rows[:1].numel() if rows.shape[0] else 0
        self.sent += row * (sum(send) - send[self.inner.rank])
        return self.inner.start_all_to_all(outbox)

    def start_all_gather(self, rows: Tensor) -> Pending:
        self.sent += rows.element_size() * rows.numel() * (self.inner.size - 1)
        return self.inner.start_all_gather(rows)


@pytest.mark.parametrize("tokens", [16, 21])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 5)])
@pytest.mark.parametrize(
    "degrees",
    [
        {"ulysses_degree": 2},
        {"ulysses_degree": 4},
        {"ring_degree": 4},
        {"ulysses_degree": 2, "ring_degree": 2},
        {"allgather_degree": 4},
    ],
)
def test_the_bytes_are_those_that_ranks_send(
    degrees: dict[str, int], heads: tuple[int, int], tokens: int
) -> None:
    config = split(**degrees)
    call = AttentionCall(
        tokens=tokens, heads=heads[0], kv_heads=heads[1], head_size=8, batch=2, element_bytes=4
    )

    def work(parallel: Parallel) -> int:
        groups = [Counting(group) for group in (parallel.everyone, parallel.ulysses, parallel.ring)]
        lengths = {"self": (tokens, tokens)}
        with (
            use_parallel(Parallel(parallel.config, *groups)) as counted,  # type: ignore[arg-type]
            use_attention_config("TORCH_SDPA", device="cpu"),
        ):
            assert counted is not None
            layer = Attention(heads[0], 8, role="self", num_kv_heads=heads[1])
        record = AttentionMetadata()
        prepare_attention(layer, {"self": record}, lengths)
        tensors = (torch.ones(2, tokens, count, 8) for count in (heads[0], heads[1], heads[1]))
        layer(*(counted.split(tensor) for tensor in tensors), record)
        return sum(group.sent for group in groups)

    sent = fake_ranks(config, work)
    # The model adds the busiest rank of each exchange, which need not be the same one.
    predicted = predict(call, config, H200).sent_bytes
    assert max(sent) <= predicted <= 1.2 * max(sent)
    if tokens % config.size == 0 and heads == (4, 4):
        assert set(sent) == {predicted}


def test_heads_that_ranks_do_not_share_evenly() -> None:
    """12 heads over 8 ranks: the busiest has 2, so two thirds of the ranks' time is idle or less is gained."""
    call = AttentionCall(tokens=32760, heads=12, head_size=128)
    eight = predict(call, split(ulysses_degree=8), H200)
    assert eight.efficiency < 0.75
    assert predict(call, split(ulysses_degree=4, ring_degree=2), H200).seconds < eight.seconds
    with pytest.raises(ConfigError, match="12 query heads and 12 key-value heads, which 8 ranks"):
        predict(call, ParallelConfig(ulysses_degree=8, uneven_heads="refuse"), H200)


def test_a_causal_ring_is_as_fast_as_its_last_rank() -> None:
    causal = replace(WAN, causal=True)
    ring = predict(causal, split(ring_degree=8), H200)
    gathered = predict(causal, split(allgather_degree=8), H200)
    assert ring.efficiency < 0.55 and gathered.efficiency < 0.55
    assert predict(causal, split(ulysses_degree=8), H200).efficiency > 0.8


def test_rings_hide_their_exchanges_behind_large_shards_alone() -> None:
    eight = predict(WAN, split(ring_degree=8), H200)
    assert eight.exposed_seconds == pytest.approx(H200.memory.hindrance * eight.exchange_seconds)
    assert predict(WAN, split(ring_degree=64), H200).exposed_seconds > 0.02


def test_a_host_with_more_gpus_saves_the_network() -> None:
    across, within = H200, replace(H200, ranks_per_host=64)
    for degrees in ({"ulysses_degree": 64}, {"ring_degree": 64}, {"allgather_degree": 64}):
        config = split(**degrees)
        assert predict(WAN, config, within).exchange_seconds < predict(WAN, config, across).exchange_seconds


def test_gates_travel_and_sparse_calls_compute_less() -> None:
    sparse = replace(WAN, kept=0.1)
    gated = replace(sparse, beside_query=1)
    config = split(ulysses_degree=2)
    one, other = (predict(call, config, H200) for call in (sparse, gated))
    assert other.sent_bytes * 4 == one.sent_bytes * 5
    assert one.compute_seconds == other.compute_seconds < 0.12 * predict(WAN, config, H200).compute_seconds


def test_pieces_hide_exchanges_behind_kernels() -> None:
    """All but half of the exchange; what is hidden costs the kernel its hindrance."""
    whole, pieces = (predict(WAN, ParallelConfig(ulysses_degree=2, head_pieces=n), H200) for n in (1, 2))
    assert pieces.sent_bytes == whole.sent_bytes
    share = 0.5 + 0.5 * H200.memory.hindrance
    assert pieces.exposed_seconds == pytest.approx(share * pieces.exchange_seconds)
    assert pieces.seconds < whole.seconds
    # Five heads on each of eight ranks: pieces of one head leave the processors more often with nothing to do.
    eight = (predict(WAN, ParallelConfig(ulysses_degree=8, head_pieces=n), H200) for n in (1, 5))
    first, second = (prediction.compute_seconds for prediction in eight)
    assert second > 1.05 * first
    # Heads that are not to be cut: as without pieces.
    uneven = replace(WAN, heads=7)
    assert predict(uneven, ParallelConfig(ulysses_degree=2, head_pieces=4), H200) == predict(
        uneven, split(ulysses_degree=2), H200
    )


def test_pieces_of_unequal_length_are_copied_once_more_where_they_are_gathered() -> None:
    even, uneven = (
        predict(replace(WAN, tokens=tokens), split(allgather_degree=8), H200) for tokens in (75600, 75601)
    )
    keys_and_values = 2 * 75601 * 40 * 128 * 2
    more = (2 * keys_and_values * (1 + 1 / 8)) / H200.copy + 2 * H200.launch
    assert uneven.copy_seconds - even.copy_seconds == pytest.approx(more, rel=1e-3)


def test_calibrated_on_one_rank() -> None:
    machine = calibrated(H200, replace(WAN, kept=0.1), 21e-3)
    found = predict(replace(WAN, kept=0.1), split(ulysses_degree=2), machine)
    assert found.one_rank_seconds == pytest.approx(21e-3, rel=1e-3)
    assert found.speedup == pytest.approx(21e-3 / found.seconds, rel=1e-3)


def test_a_forward_adds_what_works_token_by_token() -> None:
    one = predict(WAN, split(ulysses_degree=2), H200)
    step = predict_step(one, H200, layers=40, rest_seconds=2.0, gathered_bytes=10**7)
    assert step.one_rank_seconds == pytest.approx(40 * one.one_rank_seconds + 2.0)
    assert step.seconds == pytest.approx(
        40 * one.seconds + 1.0 + H200.collectives.latency + 5e6 / H200.collectives.exchange, rel=1e-6
    )
    assert step.sent_bytes == 40 * one.sent_bytes + 5 * 10**6
    assert one.efficiency < step.efficiency < 1


def test_a_forward_is_gathered_as_keys_are() -> None:
    """Across hosts each piece crosses the network once for a host."""
    one = predict(WAN, split(allgather_degree=64), H200)
    step = predict_step(one, H200, layers=1, rest_seconds=0.0, gathered_bytes=2 * 75648 * 40 * 128 * 2)
    assert step.exchange_seconds == pytest.approx(2 * one.exchange_seconds)
