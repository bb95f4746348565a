"""Split and gather of whole tensors, among threads and among processes alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_attn.errors import MetadataError
from omni_attn.parallel import Parallel, ParallelConfig, current_parallel, use_parallel
from omni_attn.parallel.collectives import PlannedCollectives, all_gather
from omni_attn.parallel.outbox import Counts, Rows
from omni_attn.testing import fake_ranks
from tests.parallel.scene import CONFIGS, every_config, randn


@every_config
@pytest.mark.parametrize("total", [0, 1, 2, 6, 7])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gather_is_the_inverse_of_split(config: dict[str, Any], total: int, dim: int) -> None:
    shape = [2, 3, 5]
    shape[dim] = total
    whole = randn(*shape)

    def work(parallel: Parallel) -> torch.Tensor:
        return parallel.gather(parallel.split(whole, dim), total, dim)

    assert all(torch.equal(found, whole) for found in fake_ranks(config, work))


@settings(max_examples=25)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=4))
def test_any_sizes_are_gathered(sizes: list[int]) -> None:
    whole = randn(sum(sizes), 3)

    def work(parallel: Parallel) -> torch.Tensor:
        return all_gather(parallel.everyone, whole.split(sizes)[parallel.rank], sizes)

    found = fake_ranks({"ulysses_degree": len(sizes)}, work)
    assert all(torch.equal(rows, whole) for rows in found)


@pytest.mark.parametrize("total", [6, 7, 2])
def test_gradients_come_back_from_every_rank(total: int) -> None:
    whole = randn(1, total, 2).requires_grad_()
    weights = randn(3, 1, total, 2, seed=2)

    def work(parallel: Parallel) -> torch.Tensor:
        gathered = parallel.gather(parallel.split(whole), total)
        return (gathered * weights[parallel.rank]).sum()

    torch.stack(fake_ranks({"ring_degree": 3}, work)).sum().backward()
    torch.testing.assert_close(whole.grad, weights.sum(0))


def test_a_piece_that_is_not_the_ranks_share_is_refused() -> None:
    def work(parallel: Parallel) -> None:
        with pytest.raises(MetadataError, match=rf"rank {parallel.rank} holds 5 of 7 tokens.*its share"):
            parallel.gather(randn(1, 5, 2), 7)

    fake_ranks({"ulysses_degree": 2}, work)


@pytest.mark.parametrize(
    "ask",
    [
        lambda group: group.start_all_to_all(Rows(randn(4, 2), Counts([2, 2], [2, 2]))),
        lambda group: group.start_all_gather(randn(4, 2)),
        lambda group: group.wait(randn(4, 2)),
        lambda group: group.share_counts((1, 2)),
    ],
)
def test_planned_ranks_exchange_nothing(ask: Callable[[PlannedCollectives], object]) -> None:
    with pytest.raises(MetadataError, match=r"split over 2 ranks was planned.*torchrun"):
        ask(PlannedCollectives(2))


@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_are_numbered_ulysses_first(name: str) -> None:
    config = ParallelConfig.model_validate(CONFIGS[name])

    def work(parallel: Parallel) -> tuple[int, int, int]:
        assert current_parallel() is parallel
        return parallel.rank, parallel.ring.rank, parallel.ulysses.rank

    degree = config.ulysses_degree if config.allgather_degree == 1 else 1
    assert fake_ranks(config, work) == [
        (n, n // degree % config.ring_degree, n % degree) for n in range(config.size)
    ]


def test_one_process_splits_nothing() -> None:
    with use_parallel(ParallelConfig()) as parallel:
        assert parallel is None and current_parallel() is None
    with use_parallel(ParallelConfig(ulysses_degree=2)) as planned:
        assert planned is not None and planned.mode == "ulysses"
        with use_parallel(None):
            assert current_parallel() is None
        assert current_parallel() is planned


def test_an_error_of_one_rank_ends_all() -> None:
    def work(parallel: Parallel) -> None:
        if parallel.rank == 1:
            raise RuntimeError("rank 1 has no more room")
        parallel.everyone.share_counts((0, 0))

    with pytest.raises(RuntimeError, match="rank 1 has no more room"):
        fake_ranks({"ring_degree": 3}, work)
