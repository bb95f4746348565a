"""How the kernels of latent attention are cut."""

from __future__ import annotations

import pytest

from omni_attn.ops.mla.plan import plan_decode, prefill_tile

HOPPER, ADA, AMPERE = 227 * 1024, 99 * 1024, 163 * 1024
DEEPSEEK = {"latent": 512, "rope": 64}


def decode(heads: int, memory: int, item_bytes: int = 2, rows: int = 8, keys: int = 4096) -> tuple[int, ...]:
    plan = plan_decode(
        num_rows=rows,
        max_seq_len=keys,
        heads=heads,
        item_bytes=item_bytes,
        shared_memory=memory,
        num_sms=132,
        **DEEPSEEK,
    )
    return *plan.tile, plan.splits


@pytest.mark.parametrize("memory", [HOPPER, AMPERE, ADA])
@pytest.mark.parametrize("heads", [4, 16, 17, 128])
def test_decode_tiles_fit(memory: int, heads: int) -> None:
    rows, keys, _, stages, _ = decode(heads, memory)
    buffers = stages - 1 if rows < 64 and stages > 2 else stages  # as offline compilation has it
    held = 2 * (rows * 576 + buffers * keys * 576)
    assert held <= memory and min(rows, keys) >= 16
    assert rows == 16 if heads <= 16 else rows > 16, "more heads than a narrow tile has get a wide one"


def test_hopper_takes_what_was_fastest_there() -> None:
    assert decode(16, HOPPER)[:4] == (16, 64, 8, 3) and decode(128, HOPPER)[:4] == (64, 32, 8, 3)
    assert prefill_tile(4096, 128, 64, 128, 2, HOPPER) == (128, 64, 8, 3)


def test_splits_fill_the_gpu_and_no_more() -> None:
    assert decode(128, HOPPER, rows=64)[-1] == 1, "128 programs fill it already"
    assert decode(128, HOPPER, rows=1)[-1] > 8
    assert decode(128, HOPPER, rows=1, keys=64)[-1] == 1, "there is nothing to split"


@pytest.mark.parametrize(("queries", "rows"), [(1, 16), (17, 32), (4096, 128)])
def test_prefill_tiles(queries: int, rows: int) -> None:
    assert prefill_tile(queries, 128, 64, 128, 2, HOPPER).rows == rows
    assert prefill_tile(queries, 128, 64, 128, 2, ADA).rows == min(rows, 64)
    assert prefill_tile(queries, 128, 64, 128, 4, HOPPER).rows <= 64
