"""The mass that is kept and the errors, against loops over tokens in float64."""

from __future__ import annotations

import pytest
import torch

from omni_attn.inspection.figures import figures_of_all, figures_of_heads, relative_error
from omni_attn.inspection.mass import Comparison, compare_with_dense
from omni_attn.ops.block_sparse.executor import SelectedBlocks
from omni_attn.ops.block_sparse.selection import BlockSelection, block_map
from omni_attn.ops.reference import reference_attention
from tests.inspection.calls import SCALE, SparseCall, sparse_call


def compared(call: SparseCall, **options: object) -> Comparison:
    return compare_with_dense(
        call.query,
        call.key,
        call.value,
        call.output,
        call.selection,
        SCALE,
        **options,  # type: ignore[arg-type]
    )


def softmax_of(call: SparseCall, item: int, head: int, token: int) -> torch.Tensor:
    """Dense weights [S] of one query token."""
    group = head // (call.query.shape[2] // call.key.shape[2])
    scores = [SCALE * torch.dot(call.query[item, token, head], key) for key in call.key[item, :, group]]
    exponents = torch.stack(scores).exp()
    return exponents / exponents.sum()


@pytest.mark.parametrize("chunk_scores", [1, 700, 2**25])
def test_mass_is_that_of_a_loop(chunk_scores: int) -> None:
    call = sparse_call(3)
    found = compared(call, chunk_scores=chunk_scores)
    tiles = call.tiles
    members = [(tiles.block_of == block).nonzero().flatten().tolist() for block in range(tiles.num_blocks)]
    chosen = block_map(call.selection.selected, tiles.num_blocks)
    for item in range(2):
        for head in range(4):
            for block, tokens in enumerate(members):
                mean = torch.stack([softmax_of(call, item, head, token) for token in tokens]).mean(0)
                mass = torch.stack([mean[keys].sum() for keys in members])
                torch.testing.assert_close(found.mass[item, head, block].double(), mass, rtol=1e-6, atol=1e-7)
                kept = mass[chosen[item, head, block]].sum()
                torch.testing.assert_close(found.kept[item, head, block], kept, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gated", [False, True])
def test_errors_are_those_of_the_outputs(gated: bool) -> None:
    call = sparse_call(3, gated=gated)
    other = torch.randn_like(call.output)
    found = compared(call, others={"other": other})
    dense, _ = reference_attention(call.query, call.key, call.value, softmax_scale=SCALE)
    alone = sparse_call(3).output  # the same tensors, without the gate
    for name, output in (("output", call.output), ("other", other)):
        torch.testing.assert_close(found.deviations[name], (output - dense).square().sum((1, 3)))
    torch.testing.assert_close(found.sparse_alone, (alone - dense).square().sum((1, 3)))
    torch.testing.assert_close(found.dense, dense.square().sum((1, 3)))
    assert relative_error(found.sparse_alone, found.dense) > 0.05
    assert relative_error(found.kernel, found.kernel_norm) < 1e-6  # the coarse output is given in float64
    if gated:
        assert relative_error(found.deviations["output"], found.dense) > 0.05
        assert not torch.allclose(found.deviations["output"], found.sparse_alone, rtol=0.01)


def test_a_kernel_that_ran_something_else_is_seen() -> None:
    call, other = sparse_call(3), sparse_call(4)
    wrong = SparseCall(call.query, call.key, call.value, other.output, call.selection)
    found = compared(wrong)
    assert relative_error(found.kernel, found.kernel_norm) > 0.02


def test_everything_selected_keeps_everything() -> None:
    call = sparse_call(12)
    assert call.tiles.num_blocks == 12
    found = compared(call)
    torch.testing.assert_close(found.kept, torch.ones_like(found.kept), rtol=1e-12, atol=1e-12)
    figures = figures_of_all(call.selection, found)
    assert figures.mass_kept == pytest.approx(1, abs=1e-12)
    assert figures.least_mass_kept == pytest.approx(1, abs=1e-12)
    assert (figures.tiles, figures.pairs, figures.effective_sparsity) == (1.0, 1.0, 0.0)
    assert max(figures.error, figures.error_without_coarse, figures.kernel_error) < 1e-12


def test_rows_without_a_block_keep_nothing() -> None:
    call = sparse_call(3)
    selected = call.selection.selected
    none = SelectedBlocks(selected.indices, torch.zeros_like(selected.counts))
    selection = BlockSelection(none, call.tiles, call.tiles)
    zeros = SparseCall(call.query, call.key, call.value, torch.zeros_like(call.output), selection)
    found = compared(zeros)
    assert found.kept.count_nonzero() == 0
    assert torch.equal(found.kernel, torch.zeros_like(found.kernel))
    torch.testing.assert_close(found.sparse_alone, found.dense)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    """Where the selected tiles hold next to nothing of the dense softmax, attention over them is still theirs."""
    call = sparse_call(1)
    chosen = call.selection.selected.indices
    away = SelectedBlocks((chosen + 1) % call.tiles.num_blocks, call.selection.selected.counts)
    query = call.query * 2000
    packed_output = torch.zeros_like(call.output)
    selection = BlockSelection(away, call.tiles, call.tiles)
    found = compared(SparseCall(query, call.key, call.value, packed_output, selection))
    assert all(x.isfinite().all() for x in (found.mass, found.kept, found.sparse_alone, found.kernel_norm))
    assert (found.kernel_norm > 0.1).all()


def test_figures_of_a_ragged_grid() -> None:
    call = sparse_call(3)
    found = compared(call)
    sizes = torch.tensor(call.tiles.sizes)
    chosen = block_map(call.selection.selected, call.tiles.num_blocks).long()
    pairs = torch.einsum("bhqk,q,k->h", chosen, sizes, sizes)
    heads = figures_of_heads(call.selection, found)
    assert [figures.head for figures in heads] == [0, 1, 2, 3]
    assert [figures.pairs for figures in heads] == [int(n) / (2 * 60 * 60) for n in pairs]
    assert all(figures.tiles == 3 / 12 for figures in heads)
    total = figures_of_all(call.selection, found)
    assert total.head is None
    assert total.pairs == int(pairs.sum()) / (2 * 4 * 60 * 60) != total.tiles
    assert total.effective_sparsity == 1 - total.pairs
    kept = found.kept.repeat_interleave(sizes, -1)  # one entry per query token
    assert total.mass_kept == pytest.approx(float(kept.mean()), rel=1e-12)
    for figures in heads:
        assert figures.least_mass_kept == float(found.kept[:, figures.head].min())
        assert figures.least_mass_kept in found.kept[:, figures.head, figures.least_tile].tolist()
    assert total.least_mass_kept == min(figures.least_mass_kept for figures in heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_tensors_are_compared_in_float64(dtype: torch.dtype) -> None:
    call = sparse_call(3, dtype=dtype)
    found = compared(call)
    limit = 1e-6 if dtype is torch.float32 else 5e-3
    assert 0 < relative_error(found.kernel, found.kernel_norm) < limit
