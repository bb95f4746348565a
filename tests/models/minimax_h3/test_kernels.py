"""The model on Triton's passes over rows is the model on torch's operators: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from omni_attn.models.minimax_h3 import block, rope
from omni_attn.ops import rowwise
from tests.models.minimax_h3.tiny_models import build_inputs, build_model
from tests.ops.triton_here import DEVICE, needs_triton


@needs_triton
def test_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(num_layers=1, num_refiner_layers=1).to(DEVICE)
    inputs = {name: tensor.to(DEVICE) for name, tensor in build_inputs("ref2va", batch=1).items()}
    outputs = []
    kernels, calls = rowwise._kernels(), []
    for used in (None, kernels):
        for module in (block, rope):
            monkeypatch.setattr(module, "rowwise_kernels", lambda *_, used=used: calls.append(used) or used)
        with torch.no_grad():
            outputs.append(model(**inputs))
    # Swiglu of the text, then in the block: two norms, two sums, two turned heads, swiglu; two heads' norms.
    assert kernels is not None and calls.count(kernels) == calls.count(None) == 10
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
