"""Buffers that keep their address from step to step."""

from __future__ import annotations

import pytest
import torch

from omni_attn.backends.buffers import BufferPool


def test_values_of_later_steps_lie_at_the_same_place_and_nothing_old_behind_them() -> None:
    pool = BufferPool("cpu")
    first = pool.stage("slots", torch.arange(6), fill=-1)
    second = pool.stage("slots", torch.arange(2) + 10, fill=-1)
    assert first.data_ptr() == second.data_ptr() and second.tolist() == [10, 11]
    assert first.tolist() == [10, 11, -1, -1, -1, -1]
    assert pool.stage("slots", torch.arange(3), rows=5, fill=-1).tolist() == [0, 1, 2, -1, -1]


def test_what_is_staged_already_is_not_copied_again() -> None:
    pool = BufferPool("cpu")
    staged = pool.stage("x", torch.ones(3, 2))
    version = staged._version
    assert pool.stage("x", staged).data_ptr() == staged.data_ptr() and staged._version == version
    assert torch.equal(pool.stage("x", staged[:1], rows=3), torch.tensor([[1.0, 1], [0, 0], [0, 0]]))


def test_names_dtypes_and_forms_of_a_row_have_buffers_of_their_own() -> None:
    pool = BufferPool("cpu")
    tensors = [torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2)]
    places = {pool.stage("x", tensor).data_ptr() for tensor in tensors}
    assert len(places) == 4 and pool.stage("y", tensors[0]).data_ptr() not in places
    assert all(pool.stage("x", tensor).is_contiguous() for tensor in tensors)


def test_a_number_is_staged_as_one() -> None:
    pool = BufferPool("cpu")
    one = pool.stage("sigma", torch.tensor(0.5))
    two = pool.stage("sigma", torch.tensor(0.25))
    assert one.shape == () and one.data_ptr() == two.data_ptr() and float(one) == 0.25


def test_a_frozen_pool_grows_no_buffer_but_takes_new_ones() -> None:
    pool = BufferPool("cpu")
    pool.stage("table", torch.zeros(2, 3))
    pool.stage("table", torch.zeros(4, 3))
    pool.freeze()
    pool.stage("table", torch.zeros(4, 3))
    pool.stage("other", torch.zeros(9))
    with pytest.raises(RuntimeError, match='"table" should hold 5 rows and holds 4'):
        pool.stage("table", torch.zeros(5, 3))
    with pytest.raises(ValueError, match='"table": 3 rows of values, and 2'):
        pool.stage("table", torch.zeros(3, 3), rows=2)


def test_buffers_of_inference_mode_are_written_outside_of_it() -> None:
    pool = BufferPool("cpu")
    with torch.inference_mode():
        pool.stage("x", torch.zeros(2))
    assert pool.stage("x", torch.ones(2)).tolist() == [1, 1]
