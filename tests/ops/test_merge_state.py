"""Attention over two parts of the keys, merged, is attention over all of them; by torch and by Triton."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_attn.errors import MetadataError
from omni_attn.ops import merge_state
from omni_attn.ops.merge_state import merge_attn_states
from omni_attn.ops.reference import reference_attention
from tests.ops.triton_here import DEVICE, in_another_process, interpret, needs_triton

INFINITY = float("inf")
# numpy, which the interpreter computes with, warns where a logarithm of zero is meant.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")

Merge = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def by_torch(*arguments: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_state, "_kernels", lambda output: None)
        return merge_attn_states(*arguments)  # type: ignore[arg-type]


def by_triton(*arguments: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_state, "_kernels", lambda output: merge_state._triton_module())
        return merge_attn_states(*arguments)  # type: ignore[arg-type]


MERGES = [by_torch, pytest.param(by_triton, marks=needs_triton)]
every_merge = pytest.mark.parametrize("merge", MERGES)


@in_another_process
def test_in_the_interpreter() -> None:
    interpret(__file__)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, D] and log-sum-exp [H, T] over some keys, which may be none; the oracle, in float64."""
    if not key.shape[0]:
        return torch.full_like(query, float("nan")), query.new_full(query.shape[1::-1], -INFINITY)
    output, lse = reference_attention(query[None], key[None], value[None])
    return output[0].to(query.dtype), lse[0].float()


@every_merge
@settings(max_examples=12)
@given(size=st.sampled_from([5, 16, 24]), cut=st.integers(0, 7), scale=st.sampled_from([1.0, 30.0]))
def test_parts_merge_to_the_whole(merge: Merge, size: int, cut: int, scale: float) -> None:
    query, key, value = noise(3, 2, size) * scale, noise(7, 2, size, seed=1), noise(7, 2, size, seed=2)
    front, behind = attend(query, key[:cut], value[:cut]), attend(query, key[cut:], value[cut:])
    output, lse = merge(*front, *behind)
    wanted, wanted_lse = attend(query, key, value)
    torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


@every_merge
@pytest.mark.parametrize("nothing", [-INFINITY, INFINITY])
def test_what_has_no_key_does_not_count(merge: Merge, nothing: float) -> None:
    first, second = noise(4, 3, 8), noise(4, 3, 8, seed=1)
    lses = [noise(3, 4, seed=2), noise(3, 4, seed=3)]
    lses[0][:, 1], lses[1][:, 2], lses[0][:, 3], lses[1][:, 3] = nothing, nothing, nothing, -INFINITY
    first[1], second[2], first[3], second[3] = float("nan"), float("inf"), float("nan"), float("nan")
    output, lse = merge(first, lses[0], second, lses[1])
    assert torch.equal(output[1], second[1]) and torch.equal(output[2], first[2])
    assert torch.equal(lse[:, 1], lses[1][:, 1]) and torch.equal(lse[:, 2], lses[0][:, 2])
    assert output[3].abs().max() == 0 and (lse[:, 3] == -INFINITY).all()
    assert output.isfinite().all()


@every_merge
def test_into_a_tensor_of_ones_own_and_from_strided_ones(merge: Merge) -> None:
    both, lses = noise(4, 6, 16).half(), noise(2, 4, 3, seed=1)
    first, second = both[:, ::2, :8], both[:, 1::2, 8:]
    lses_HT = lses[0].T, lses[1].T
    wanted = merge(first.clone(), lses_HT[0].contiguous(), second.clone(), lses_HT[1].contiguous())
    output = torch.zeros(4, 8, 3, device=DEVICE).transpose(1, 2)
    found = merge(first, lses_HT[0], second, lses_HT[1], output)
    assert found[0] is output and wanted[0].dtype == torch.float16
    assert torch.equal(output.half(), wanted[0]) and torch.equal(found[1], wanted[1])
    for in_place in (first.clone(), first.mT.contiguous().mT):
        merge(in_place, lses_HT[0], second, lses_HT[1], in_place)
        assert torch.equal(in_place, wanted[0])


@every_merge
def test_no_tokens(merge: Merge) -> None:
    empty, lse = noise(0, 2, 8), noise(2, 0)
    output, merged = merge(empty, lse, empty, lse)
    assert output.shape == (0, 2, 8) and merged.shape == (2, 0)


def test_computed_in_float32_and_rounded_once() -> None:
    first, second = noise(9, 2, 8).bfloat16(), noise(9, 2, 8, seed=1).bfloat16()
    lses = noise(2, 9, seed=2), noise(2, 9, seed=3)
    exact, _ = merge_attn_states(first.float(), lses[0], second.float(), lses[1])
    assert torch.equal(merge_attn_states(first, lses[0], second, lses[1])[0], exact.bfloat16())


def test_shapes_that_do_not_fit() -> None:
    parts, lse = noise(3, 2, 8), noise(2, 3)
    with pytest.raises(MetadataError, match=r"\(3, 2, 8\) and \(3, 2, 4\)"):
        merge_attn_states(parts, lse, parts[..., :4], lse)
    with pytest.raises(MetadataError, match=r"\(3, 2, 8\) and \(2, 2, 8\)"):
        merge_attn_states(parts, lse, parts, lse, parts[:2])
    with pytest.raises(MetadataError, match=r"3 tokens and 2 heads .* \(3, 2\)"):
        merge_attn_states(parts, lse, parts, lse.T)
    with pytest.raises(MetadataError, match=r"torch.float64: needs torch.float32"):
        merge_attn_states(parts, lse.double(), parts, lse)


def test_gradients_go_through_outputs_and_log_sum_exps() -> None:
    """Those of attention over all keys; a row without any key gives none."""
    query, key, value = (noise(5, 2, 8, seed=seed).double().requires_grad_() for seed in range(3))
    hidden = torch.zeros(5, 5, dtype=torch.bool, device=DEVICE)
    hidden[1, :3] = hidden[2, 3:] = hidden[4] = True
    weights = noise(5, 2, 8, seed=4)

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.einsum("qhd,khd->hqk", query, key[keys]).masked_fill(hidden[:, keys], -1e30)
        output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[keys])
        empty = hidden[:, keys].all(-1)
        return output.masked_fill(empty[:, None, None], 0.0), scores.logsumexp(-1).masked_fill(
            empty, -INFINITY
        )

    merged, lse = merge_attn_states(*(x.float() for keys in (slice(3), slice(3, 5)) for x in part(keys)))
    whole, whole_lse = part(slice(5))
    found, wanted = (
        torch.autograd.grad((output * weights).sum() + sums[:, :4].sum(), (query, key, value))
        for output, sums in ((merged, lse), (whole, whole_lse))
    )
    for own, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=0)
    assert not found[0][4].any()


def test_gradients_never_meet_the_kernel() -> None:
    """It has no backward: its results would count as constants."""
    first, second, lse = noise(3, 2, 8).requires_grad_(), noise(3, 2, 8), noise(2, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_state, "_kernels", lambda output: pytest.fail("the kernel was asked for"))
        output, _ = merge_attn_states(first, lse, second, lse)
    assert output.requires_grad
