"""Steps of latent attention: where decodes end, how earlier tokens are cut into chunks, and what is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_attn.backends.mla import MLAMetadata, MLASizes
from omni_attn.backends.mla_builder import MLAMetadataBuilder, QueryLens
from omni_attn.backends.mla_context import MOST_ROWS, plan_chunks, workspace_rows
from omni_attn.backends.paged_split import Split
from omni_attn.errors import MetadataError
from omni_attn.facts import MLAAttentionSpec
from tests.kv_cache.counted import CPU, make_common

SIZES = MLASizes(latent=16, nope=12, rope=8, value=10)
SPEC = MLAAttentionSpec(block_size=4, num_kv_heads=1, head_size=24, rope_size=8, dtype="float32")
GEOMETRY: dict[str, Any] = {
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_size": 24,
    "value_head_size": 16,
    "softmax_scale": 0.2,
    "causal": True,
}


class SingleBuilder(MLAMetadataBuilder):
    query_lens = QueryLens.SINGLE_ONLY


class UniformBuilder(MLAMetadataBuilder):
    query_lens = QueryLens.UNIFORM


def builder(kind: type[MLAMetadataBuilder] = MLAMetadataBuilder, **options: Any) -> MLAMetadataBuilder:
    return kind(kv_cache_spec=SPEC, layer_names=("a", "b"), device=CPU, sizes=SIZES, **options, **GEOMETRY)


def step(lengths: list[tuple[int, int]], padded_tokens: int = 0, **changes: Any) -> Any:
    made = make_common(lengths, **{"causal": True} | changes)
    return made.replace(num_actual_tokens=made.num_actual_tokens + padded_tokens, slot_mapping=None)


@pytest.mark.parametrize(
    ("kind", "threshold", "queries", "padded", "wanted"),
    [
        (MLAMetadataBuilder, 1, [1, 1, 1], 0, (3, 0, 3, 0)),
        (MLAMetadataBuilder, 1, [1, 1, 0], 2, (3, 0, 4, 0)),
        (MLAMetadataBuilder, 1, [5, 3], 0, (0, 2, 0, 8)),
        (MLAMetadataBuilder, 4, [2, 1, 3, 4, 5, 6, 7, 8], 0, (4, 4, 10, 26)),
        (UniformBuilder, 4, [2, 1, 2, 4, 5, 6, 7, 8], 0, (1, 7, 2, 33)),
        (UniformBuilder, 3, [2, 2, 2, 0], 2, (4, 0, 8, 0)),
        (UniformBuilder, 3, [2, 2, 1, 3, 2, 1, 2], 0, (2, 5, 4, 9)),
        (SingleBuilder, 1, [1, 1, 4, 1], 0, (2, 2, 2, 5)),
    ],
)
def test_sides(
    kind: type[MLAMetadataBuilder], threshold: int, queries: list[int], padded: int, wanted: Split
) -> None:
    common = step([(q, q and q + 5) for q in queries], padded)
    metadata = builder(kind, decode_threshold=threshold).build(common)
    assert metadata.split == wanted
    assert (metadata.prefill is None) == (wanted[1] == 0) and (metadata.decode is None) == (wanted[2] == 0)
    real = sum(queries)
    assert metadata.num_tokens == (real if wanted[1] else real + padded)


def test_each_token_of_a_decode_sees_what_came_before_it() -> None:
    metadata = builder(decode_threshold=3).build(step([(1, 7), (3, 9), (0, 0), (2, 2)], padded_tokens=2))
    assert metadata.decode is not None
    assert metadata.decode.row_requests.tolist()[:6] == [0, 1, 1, 1, 3, 3]
    assert metadata.decode.row_lens.tolist() == [7, 7, 8, 9, 1, 2, 0, 0]
    assert metadata.decode.row_lens.dtype == metadata.decode.row_requests.dtype == torch.int32


def test_tokens_of_a_block_see_all_of_it() -> None:
    common = step([(3, 9), (3, 3), (0, 0)], padded_tokens=3, causal=False)
    metadata = builder(non_causal_blocks=True).build(common)
    assert metadata.split == (3, 0, 9, 0) and metadata.decode is not None
    assert metadata.decode.row_lens.tolist() == [9, 9, 9, 3, 3, 3, 0, 0, 0]


@pytest.mark.parametrize(
    ("queries", "options", "text"),
    [
        ([3, 3], {}, "non_causal_blocks=True"),
        ([3, 2], {"non_causal_blocks": True}, r"equal length.*\[3, 2\]"),
        (
            [0, 3, 3],
            {"non_causal_blocks": True},
            r"padding behind them alone, found query lengths \[0, 3, 3\]",
        ),
    ],
)
def test_steps_that_are_not_causal(queries: list[int], options: Any, text: str) -> None:
    common = step([(q, q and q + 5) for q in queries], causal=False)
    with pytest.raises(MetadataError, match=text):
        builder(**options).build(common)


def test_a_kernel_of_single_tokens_takes_no_blocks_of_several() -> None:
    one = builder(SingleBuilder, non_causal_blocks=True)
    assert one.build(step([(1, 4), (1, 6)], causal=False)).split == (2, 0, 2, 0)
    with pytest.raises(MetadataError, match="blocks of 2 tokens"):
        one.build(step([(2, 4), (2, 6)], causal=False))


def test_thresholds_that_the_kernel_does_not_take() -> None:
    with pytest.raises(ValueError, match="decode_threshold=2: SingleBuilder needs 1"):
        builder(SingleBuilder, decode_threshold=2)
    with pytest.raises(ValueError, match="decode_threshold=0"):
        builder(decode_threshold=0)


def test_causality_by_request_is_refused() -> None:
    common = step([(1, 4), (1, 6)], causal=torch.tensor([1, 0], dtype=torch.int32))
    with pytest.raises(MetadataError, match="one bool for all"):
        builder(non_causal_blocks=True).build(common)


def test_prefills_need_lengths_on_the_host_and_decodes_do_not() -> None:
    assert builder().build(step([(1, 4), (1, 9)], seq_lens_cpu=None)).split == (2, 0, 2, 0)
    with pytest.raises(MetadataError, match="seq_lens_cpu"):
        builder().build(step([(1, 4), (3, 9)], seq_lens_cpu=None))


def test_graphs_hold_decodes() -> None:
    assert builder(decode_threshold=2).build_for_cudagraph_capture(step([(2, 4), (2, 9)])).prefill is None
    with pytest.raises(MetadataError, match=r"up to 3 tokens.*at most 1"):
        builder().build_for_cudagraph_capture(step([(3, 4), (1, 9)]))


def test_metadata_is_frozen_and_update_makes_a_new_one() -> None:
    one = builder(workspace=4)
    common = step([(1, 9), (2, 9)])
    metadata = one.build(common)
    with pytest.raises(FrozenInstanceError):
        metadata.split = Split(0, 0, 0, 0)
    before = metadata.prefill.chunks[0].pages.clone()
    moved = one.update_block_table(metadata, common.block_table + 10, None)
    again = one.build(common.replace(block_table=common.block_table + 10))
    assert torch.equal(metadata.prefill.chunks[0].pages, before)
    assert isinstance(moved, MLAMetadata) and moved.prefill is not None and moved.decode is not None
    for chunk, wanted in zip(moved.prefill.chunks, again.prefill.chunks, strict=True):
        assert torch.equal(chunk.pages, wanted.pages) and not torch.equal(chunk.pages, before)
    assert torch.equal(moved.decode.block_table, again.decode.block_table)


@given(
    contexts=st.lists(st.integers(0, 40), max_size=6),
    pages=st.integers(1, 5),
    size=st.sampled_from([1, 3, 4, 8]),
)
@settings(max_examples=200, deadline=None)
def test_chunks_hold_every_earlier_token_once(contexts: list[int], pages: int, size: int) -> None:
    rows = pages * size
    plans = plan_chunks(contexts, rows, size)
    seen: list[list[int]] = [[] for _ in contexts]
    for plan in plans:
        assert 0 < sum(plan.lengths) <= rows and len(plan.starts) == len(plan.lengths)
        for offset, (start, length) in enumerate(zip(plan.starts, plan.lengths, strict=True)):
            assert offset == 0 or start == 0, "only the first of a chunk goes on"
            assert start % size == 0, "a request is cut between pages"
            seen[plan.first + offset] += range(start, start + length)
    assert seen == [list(range(context)) for context in contexts]
    # As many as fit: what a chunk leaves free does not hold the next page that waits.
    for plan, behind in pairwise(plans):
        free, waits = (
            rows - sum(plan.lengths),
            behind.lengths[next(i for i, n in enumerate(behind.lengths) if n)],
        )
        assert free < min(size, waits) or free < size


def test_a_workspace_holds_a_page() -> None:
    with pytest.raises(ValueError, match=r"3 rows.*4 tokens"):
        plan_chunks([9], 3, 4)
    assert builder(workspace=1).workspace == 4


@pytest.mark.parametrize(
    ("longest", "reqs", "size", "wanted"),
    [
        (1024, 4, 16, 8192),
        (16, 64, 16, 4096),
        (1 << 20, 4, 16, MOST_ROWS),
        (10, 1, 24, 96),
        (1 << 20, 4, 24, 65544),
    ],
)
def test_rows_of_a_workspace(longest: int, reqs: int, size: int, wanted: int) -> None:
    assert workspace_rows(longest, reqs, size) == wanted
