"""Summary keys: the published numbers, the contract of executors that know them, and the whole method."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from omni_attn.errors import MetadataError
from omni_attn.ops import block_summary
from omni_attn.ops.block_sparse import kept, summary_gradients
from omni_attn.ops.block_sparse.executor import SummarisingExecutor
from omni_attn.ops.block_sparse.partition import BlockPartition
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.block_summary import block_summary_attention, raster_blocks, select_by_means
from omni_attn.ops.reference import reference_attention
from omni_attn.ops.video_tiles import video_tiles
from tests.ops.block_inputs import SCALE, waves
from tests.ops.block_summary_oracle import block_summary_of, runs_of, with_summaries
from tests.ops.executors import (
    ExecutorCase,
    Tensors,
    View,
    as_tensors,
    assert_near,
    blocks_of,
    random_examples,
    some_blocks,
    stored_heads_first,
    stored_once,
    stored_with_gaps,
    stored_with_others,
)
from tests.ops.vsa_oracle import Selection, fine_of, margin_of, scores_of

CPU = torch.device("cpu")


def summarising(case: ExecutorCase) -> SummarisingExecutor:
    executor = case.make()
    assert isinstance(executor, SummarisingExecutor)
    return executor


def attend(
    case: ExecutorCase,
    tensors: Tensors,
    query_blocks: BlockPartition,
    key_blocks: BlockPartition,
    selection: Selection,
    scale: float = SCALE,
    *,
    ignored: int = -1,
) -> torch.Tensor:
    executor = summarising(case)
    selected = as_tensors(selection, key_blocks.num_blocks, case.device, ignored)
    return executor.attend_with_summaries(
        executor.pack(*tensors, query_blocks, key_blocks), selected, softmax_scale=scale
    )


def runs(case: ExecutorCase, tokens: int, size: int) -> BlockPartition:
    return BlockPartition.in_order(tokens, size, case.device)


# -- the published numbers


def test_published_numbers() -> None:
    output = block_summary_attention(TorchExecutor(), *waves(50), 16, 2, SCALE)
    for found, expected in (
        (output[0, 0, 0, :4], [-0.441567, -0.523648, -0.523057, -0.439887]),
        (output[0, 49, 1, :4], [-0.588044, -0.819987, -0.922472, -0.879319]),
    ):
        torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=0, atol=1e-6)
    assert output.sum().item() == pytest.approx(45.458577917, abs=1e-6)
    assert output.square().sum().item() == pytest.approx(106.047696531, abs=1e-6)


def test_published_numbers_without_summaries() -> None:
    executor, blocks = TorchExecutor(), raster_blocks(50, 16, CPU)
    packed = executor.pack(*waves(50), blocks, blocks)
    output = executor.attend(packed, select_by_means(packed.means, 2, SCALE), SCALE)
    expected = torch.tensor([-0.917021, -0.990507, -0.907613, -0.681428]).double()
    torch.testing.assert_close(output[0, 0, 0, :4], expected, rtol=0, atol=1e-6)
    assert output.sum().item() == pytest.approx(138.352144947, abs=1e-6)


# -- the contract of executors


@random_examples
@given(st.data())
def test_any_length_block_size_and_budget(executor: ExecutorCase, data: st.DataObject) -> None:
    draw = data.draw
    tokens, keys = draw(st.tuples(st.integers(1, 90), st.integers(1, 90)))
    size = draw(st.sampled_from([1, 7, 16, 24, 40, 128]))
    batch, kv_heads, share = draw(st.sampled_from([(1, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)]))
    rows, blocks = -(-tokens // size), -(-keys // size)
    topk = draw(st.integers(1, blocks))
    assume(batch * kv_heads * share * rows * (topk * -(-size // 16) + -(-blocks // 16)) <= 40)
    dtype = draw(st.sampled_from(executor.dtypes))
    tensors = executor.tensors(
        dtype,
        tokens,
        keys,
        batch=batch,
        heads=kv_heads * share,
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([5, 16, 24])),
        value_size=draw(st.sampled_from([None, 7, 32])),
        seed=draw(st.integers(0, 99)),
    )
    scale = draw(st.sampled_from([tensors[0].shape[-1] ** -0.5, 0.05, 1.3]))
    query, key = (x.cpu().double() for x in tensors[:2])
    scores = scores_of(query, key, runs_of(tokens, size), runs_of(keys, size), scale)
    assume(margin_of(scores, topk) > 1e-4)  # rounding decides between equals
    output = block_summary_attention(summarising(executor), *tensors, size, topk, scale)
    assert output.dtype == dtype and output.is_contiguous()
    assert_near(output, block_summary_of(*tensors, size, topk, scale))


@pytest.mark.parametrize("size", [16, 48, 128])
def test_rows_that_select_none_some_and_all(executor: ExecutorCase, size: int) -> None:
    """The places behind a count may hold the number of a block or of none."""
    blocks = runs(executor, 3 * size - 5, size)
    tensors = executor.tensors(executor.dtypes[0], blocks.tokens, blocks.tokens, heads=2)
    selection = [[[[], [1], [0, 1, 2]], [[0, 2], [2], []]]]
    listed = blocks_of(blocks)
    expected = with_summaries(*tensors, listed, listed, selection, SCALE)
    for ignored in (-1, 2, 2**31 - 1):
        output = attend(executor, tensors, blocks, blocks, selection, ignored=ignored)
        assert_near(output, expected)
    dense = fine_of(*tensors, [listed[2]], listed, [[[[0, 1, 2]]] * 2], SCALE)
    assert_near(output[:, 2 * size :, :1], dense[:, 2 * size :, :1])


def test_blocks_of_a_video_and_unlike_partitions(executor: ExecutorCase) -> None:
    """Clipped tiles, whose sizes their scores gain, as keys of runs."""
    queries = runs(executor, 50, 16)
    keys = video_tiles((3, 5, 6), (2, 4, 4), torch.device(executor.device))
    tensors = executor.tensors(executor.dtypes[0], 50, 90, heads=2, kv_heads=1)
    selection = some_blocks(1, 2, queries.num_blocks, keys.num_blocks, most=2)
    output = attend(executor, tensors, queries, keys, selection)
    assert_near(output, with_summaries(*tensors, blocks_of(queries), blocks_of(keys), selection, SCALE))


def test_blocks_of_one_token_lose_nothing(executor: ExecutorCase) -> None:
    blocks = runs(executor, 20, 1)
    tensors = executor.tensors(executor.dtypes[0], 20, 20, heads=1)
    output = attend(executor, tensors, blocks, blocks, some_blocks(1, 1, 20, 20, most=3))
    expected = reference_attention(*(x.cpu().double() for x in tensors), softmax_scale=SCALE)[0]
    assert_near(output, expected)


def test_more_blocks_than_one_step_holds(executor: ExecutorCase) -> None:
    """150 means pass by in several steps, the last of them half empty."""
    queries, keys = runs(executor, 20, 20), runs(executor, 300, 2)
    tensors = executor.tensors(executor.dtypes[0], 20, 300)
    selection = [[[[0, 63, 64, 127, 149]]]]
    output = attend(executor, tensors, queries, keys, selection)
    assert_near(output, with_summaries(*tensors, blocks_of(queries), blocks_of(keys), selection, SCALE))


@pytest.mark.parametrize("stored", [stored_heads_first, stored_with_others, stored_with_gaps, stored_once])
def test_views_are_taken_and_left_alone(executor: ExecutorCase, stored: View) -> None:
    blocks = runs(executor, 40, 16)
    tensors = executor.tensors(executor.dtypes[-1], 40, 40, batch=2, heads=2, kv_heads=1)
    if stored is stored_once:
        tensors = tuple(stored(x).contiguous() for x in tensors)  # type: ignore[assignment]
    selection = some_blocks(2, 2, 3, 3, most=2)
    plain = attend(executor, tensors, blocks, blocks, selection)
    views = tuple(map(stored, tensors))
    before = [x.clone() for x in views]
    output = attend(executor, views, blocks, blocks, selection)  # type: ignore[arg-type]
    assert torch.equal(output, plain) and output.is_contiguous()
    assert all(torch.equal(x, y) for x, y in zip(views, before, strict=True))


def test_broken_blocks_stay_in_their_head(executor: ExecutorCase) -> None:
    """A NaN reaches every row of its own head and item, and none of the next, whose means lie behind."""
    blocks = runs(executor, 40, 16)
    tensors = executor.tensors(executor.dtypes[0], 40, 40, batch=2, heads=2, kv_heads=2)
    selection = [[[[0], [1], [2]]] * 2] * 2
    expected = attend(executor, tensors, blocks, blocks, selection)
    query, key, value = (x.clone() for x in tensors)
    key[0, 39, 0] = value[0, 39, 0] = math.nan
    key[1, 0, 1] = value[1, 0, 1] = math.nan
    output = attend(executor, (query, key, value), blocks, blocks, selection)
    assert torch.equal(output[0, :, 1], expected[0, :, 1])
    assert torch.equal(output[1, :, 0], expected[1, :, 0])
    assert output[0, :, 0].isnan().all() and output[1, :, 1].isnan().all()


@pytest.mark.parametrize("logit", [60.0, -60.0, 3000.0])
def test_large_logits_neither_overflow_nor_vanish(executor: ExecutorCase, logit: float) -> None:
    blocks = runs(executor, 40, 16)
    query, key, value = executor.tensors(torch.float32, 40, 40)
    query, key = torch.zeros_like(query), torch.zeros_like(key)
    query[..., 0], key[:, 16:, :, 0] = 1.0, logit / SCALE
    selection = [[[[0], [1], [2]]]]
    output = attend(executor, (query, key, value), blocks, blocks, selection)
    listed = blocks_of(blocks)
    expected = with_summaries(query, key, value, listed, listed, selection, SCALE)
    assert_near(output, expected, torch.float16)  # scores of thousands leave float32 fewer digits


# -- gradients


@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 2, 1), (2, 2, 2)])
def test_gradients_of_triton_are_those_of_torch(
    executor: ExecutorCase, batch: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of torch are autograd's, and are held against differences below. Token by token, in small chunks."""
    monkeypatch.setattr(summary_gradients, "_CHUNK_ELEMENTS", 100)
    dtype = next(d for d in executor.dtypes if d != torch.float64)
    tensors = executor.tensors(dtype, 40, 70, batch=batch, heads=heads, kv_heads=kv_heads, value_size=32)
    exact = [x.cpu().double().requires_grad_() for x in tensors]
    leaves = [x.requires_grad_() for x in tensors]
    expected = block_summary_attention(TorchExecutor(), *exact, 16, 2, SCALE)
    output = block_summary_attention(summarising(executor), *leaves, 16, 2, SCALE)
    direction = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (expected * direction).sum().backward()
    (output * direction.to(output)).sum().backward()
    for ours, theirs in zip(leaves, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == dtype
        assert_near(ours.grad, theirs.grad, dtype if dtype == torch.float32 else torch.bfloat16)


def test_gradients_are_the_slopes_of_the_output() -> None:
    leaves = [x.clone().requires_grad_() for x in waves(40)]
    assert torch.autograd.gradcheck(
        lambda *call: block_summary_attention(TorchExecutor(), *call, 16, 1, SCALE)[:, ::7],
        leaves,
        fast_mode=True,
        eps=1e-7,
        atol=1e-5,
    )


def test_a_selection_is_the_same_with_and_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    scores = block_summary.coarse_scores

    def watched(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        given.append(torch.is_grad_enabled())
        return scores(query, key, scale)

    monkeypatch.setattr(block_summary, "coarse_scores", watched)
    block_summary_attention(TorchExecutor(), *(x.requires_grad_() for x in waves(40)), 16, 1, SCALE)
    assert given == [False]


# -- what is kept


def test_blocks_are_made_once_and_not_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = [False]
    monkeypatch.setattr(kept, "is_capturing", lambda _: capturing[0])
    monkeypatch.setattr(kept, "_captured", set())
    blocks = raster_blocks(77, 16, CPU)
    assert blocks.sizes == (16, 16, 16, 16, 13) and raster_blocks(77, 16, CPU) is blocks
    capturing[0] = True
    assert raster_blocks(77, 16, CPU) is blocks
    with pytest.raises(MetadataError, match="run it once before capturing"):
        raster_blocks(7919, 16, CPU)  # a length that no other test has
