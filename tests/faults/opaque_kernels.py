"""Stand-in kernels that torch.compile cannot look into, as it cannot look into the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from omni_attn.backends import cudnn_attn
from omni_attn.testing.standins.cudnn import CuDNNStandIn
from omni_attn.testing.standins.log import CallLog
from tests.layer.stands import Stand

_current: list[CuDNNStandIn] = []


@torch.library.custom_op("omni_attn_tests::cudnn_attention", mutates_args=())
def _cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    results = _current[-1](query, key, value, attn_bias, True, 0.0, is_causal, scale=scale)
    return results[0], results[1]


@_cudnn_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _size = query.shape
    output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(batch, heads, tokens, 1, dtype=torch.float32)


class _OpaqueCuDNN:
    """The aten operator's signature in front of the opaque one."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        arguments = (query, key, value, attn_bias, compute_log_sumexp, is_causal, scale)
        return (*torch.ops.omni_attn_tests.cudnn_attention(*arguments), *(None,) * 7)


@contextmanager
def opaque_kernels(stand: Stand) -> Iterator[CallLog]:
    """stand.kernels(), with the one that is plain Python behind an operator; yields the log of kernel calls."""
    with stand.kernels() as log:
        if stand.name != "CUDNN_ATTN":
            yield log
            return
        _current.append(CuDNNStandIn(log))
        with patch.object(cudnn_attn, "cudnn_operator", _OpaqueCuDNN):
            yield log
        _current.pop()
