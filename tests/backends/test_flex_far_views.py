"""FLEX_ATTN on views whose last number lies too far from their first for 32 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_attn import AttentionMetadata
from omni_attn.backends import flex_attn, flex_kernels
from omni_attn.backends.flex_attn import FlexAttentionBackend
from omni_attn.products import build_product
from omni_attn.testing import fake_kernels


def test_they_are_copied_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel read elsewhere, or where nothing is mapped."""
    seen = list[torch.Tensor]()

    def attend(*tensors: Any) -> torch.Tensor:
        seen.extend(tensors[:3])
        return tensors[0]

    monkeypatch.setattr(flex_attn, "fits_int32", lambda tensor: tensor.stride(1) < 1000)
    near, far = torch.randn(1, 9, 1, 16), torch.randn(1, 9, 1, 1000)[..., :16]
    geometry: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_size": 16, "softmax_scale": 0.25}
    with fake_kernels("FLEX_ATTN", None):
        impl = FlexAttentionBackend.get_impl_cls()(**geometry)
        monkeypatch.setattr(flex_kernels, "compiled_attend", lambda kind: attend)
        product = build_product(
            FlexAttentionBackend.get_builder_cls()(**geometry), AttentionMetadata(), (9, 9)
        )
        impl.forward(near, far, far, product)
    assert seen[0] is near
    assert all(tensor.is_contiguous() and torch.equal(tensor, far) for tensor in seen[1:])
