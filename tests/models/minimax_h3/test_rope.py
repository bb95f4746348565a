"""Rotary positions at real-valued coordinates, on the first channels of a head."""

from __future__ import annotations

import pytest
import torch

from omni_attn.models.minimax_h3.rope import apply_rope, build_rope_table


def test_angles_are_those_of_t_then_h_then_w() -> None:
    table = build_rope_table(torch.tensor([[2.0, 0.5, -1.25]]), 16, 10000.0, torch.float32)
    cos, minus_sin = table.first[0, 0, 0], table.second[0, 0, 0]
    assert cos.shape == (48,)
    frequency = 10000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    expected = torch.cat([coordinate * frequency for coordinate in (2.0, 0.5, -1.25)])
    torch.testing.assert_close(cos.double(), expected.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(minus_sin.double(), -expected.sin(), atol=1e-6, rtol=0)
    assert torch.equal(table.first[..., 1, :], -table.second[..., 0, :])
    assert torch.equal(table.second[..., 1, :], table.first[..., 0, :])


@pytest.mark.parametrize("grad", [False, True])
def test_channel_c_turns_with_channel_c_plus_48_and_the_last_pass(grad: bool) -> None:
    table = build_rope_table(torch.tensor([[torch.pi / 2, 0, 0]]), 16, 10000.0, torch.float32)
    head = torch.randn(1, 1, 2, 128, generator=torch.Generator().manual_seed(0))
    kept = head.clone()
    with torch.set_grad_enabled(grad):
        turned = apply_rope(head, table)
    assert torch.equal(head, kept) and turned.is_contiguous()
    assert torch.equal(turned[..., 96:], head[..., 96:])
    # Frequency 1 turns by a quarter: (x0, x1) becomes (-x1, x0). Axes h and w stand still.
    torch.testing.assert_close(turned[..., 0], -head[..., 48])
    torch.testing.assert_close(turned[..., 48], head[..., 0])
    torch.testing.assert_close(turned[..., 16:48], head[..., 16:48])


def test_both_forms_agree_and_round_alike() -> None:
    generator = torch.Generator().manual_seed(1)
    positions = torch.rand(7, 3, dtype=torch.float64, generator=generator) * 300
    for dtype, rounding in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        table = build_rope_table(positions, 4, 10000.0, dtype)
        head = torch.randn(2, 7, 3, 32, generator=generator).to(dtype)
        with torch.no_grad():
            placed = apply_rope(head, table)
        joined = apply_rope(head, table)
        assert placed.dtype == joined.dtype == dtype
        torch.testing.assert_close(placed, joined, atol=rounding, rtol=rounding)
