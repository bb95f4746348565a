"""A stand-in for torch's cuDNN operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from omni_attn.backends import cudnn_attn
from omni_attn.ops.reference import reference_attention
from omni_attn.testing.standins.log import CallLog


@contextmanager
def cudnn_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the operator in place."""
    stand_in = CuDNNStandIn(log)
    with patch.object(cudnn_attn, "cudnn_operator", lambda: stand_in):
        yield


class CuDNNStandIn:
    """aten::_scaled_dot_product_cudnn_attention: [B, H, S, D], additive finite bias, causal aligned at the top left."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """The operator's nine results; only the first two are filled."""
        self.log.calls.append("_scaled_dot_product_cudnn_attention")
        assert dropout_p == 0.0 and not return_debug_mask
        assert query.shape[1] % key.shape[1] == 0 and key.shape == value.shape
        assert query.dtype == key.dtype == value.dtype, "cuDNN reads key and value as query's dtype"
        for tensor in (query, key, value):
            assert tensor.stride(-1) == 1, "the last dimension needs unit stride"
        mask = attn_bias
        if mask is not None:
            assert mask.dtype == query.dtype, f"bias {mask.dtype} with query {query.dtype}"
            assert bool(torch.isfinite(mask).all()), "cuDNN turns an infinite bias into NaN"
            assert not is_causal
        if is_causal:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
        layout = (x.transpose(1, 2) for x in (query, key, value))
        output, lse = reference_attention(*layout, softmax_scale=scale, attn_mask=mask)
        results = (
            output.transpose(1, 2).to(query.dtype),
            lse.float()[..., None] if compute_log_sumexp else None,
        )
        return (*results, *(None,) * 7)
