"""Kernels without a backward write into new memory: gradients may not get lost there without a word."""

from __future__ import annotations

import pytest

from tests.backends.rainfusion_layers import blocks_of
from tests.layer.stands import HEAD_SIZE, STANDS, Stand, tensors

FORWARD_ONLY = [
    stand
    for stand in STANDS
    if not stand.facts.backward
    and stand.facts.compile_mode == "custom_op"
    and "cuda" in stand.facts.device_kinds
]


@pytest.mark.parametrize("stand", FORWARD_ONLY, ids=str)
def test_a_backward_through_a_forward_only_kernel_raises(stand: Stand) -> None:
    call = [x.to(stand.dtype).requires_grad_() for x in tensors(1, 128, 128)]
    with stand.kernels(), blocks_of(64):  # of 128 tokens, a call that small is dense
        layer = stand.layer(4, HEAD_SIZE, mask_usage="never")
        output = layer(*call)
        assert output.requires_grad and layer.other_route is None
        with pytest.raises(Exception, match="backward"):
            output.sum().backward()
