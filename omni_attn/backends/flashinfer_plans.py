"""Planned calls of FlashInfer over ragged tensors: sequences behind one another in [T, H, D].

A plan depends on the boundaries, the geometry, the batch size, the dtype and the device; the builder knows only the
first two, so the first call plans. It has to lie before a CUDA-graph capture, where a warm-up lies anyway. Planning
writes into the wrapper's own int workspace (8 MiB, and as much pinned host memory), so each plan has a wrapper of its
own; the float workspace holds partial results of one launch only, so all plans of a device share it, and launches on
two streams at once must not.

Equal calls share one plan, whatever record or layer they come from: what a builder made keeps the plans it used, the
last few are kept here beside it, and those that a CUDA graph replays are kept for good.

Legend: B batch, S sequence, T packed tokens, H heads, G kv heads, D head size.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from omni_attn.backends.flashinfer_kernels import FlashInferKernel
from omni_attn.backends.flashinfer_quant import quantise_values
from omni_attn.backends.flashinfer_shapes import (
    Cleared,
    RaggedShape,
    check_views,
    contiguous_rows,
    strided_rows,
)
from omni_attn.backends.stated import check_token_count
from omni_attn.errors import MetadataError

WORKSPACE_BYTES = 128 * 2**20
KEPT_PLANS = 16


@dataclass(frozen=True, eq=False)
class Plan:
    """One planned launch, and what surrounds it.

    Attributes:
        run: (query [T, H, D], key, value [T, G, D], *, out, return_lse) -> output, or (output, lse [T, H] in base 2).
        rows: brings [B, S, H, D] into [T, H, D] in strides that the kernel takes.
        is_plain: nothing below is set.
        used: tokens of query and key before the last boundary, None = all.
        key_index: which keys of the flattened batch are valid, int64; None = all.
        cleared: (items, rows) that come out as zeros.
        fp8_values: values are quantised in each call.
    """

    run: Callable[..., Any]
    rows: Callable[[torch.Tensor], torch.Tensor]
    is_plain: bool = True
    used: tuple[int, int] | None = None
    key_index: torch.Tensor | None = None
    cleared: Cleared = ()
    fp8_values: bool = False

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Output [B, Sq, H, D] of query [B, Sq, H, D] over key, value [B, Sk, G, D]."""
        if self.is_plain:  # the hot path of diffusion models, kept short
            rows = self.rows
            output: torch.Tensor = self.run(rows(query), rows(key), rows(value))
            return output.view(query.shape)
        return self._run(query, key, value, with_lse=False)[0]

    def attend_with_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with the log-sum-exp [B, H, Sq] beside it, float32, natural log; not for packed calls."""
        output, lse = self._run(query, key, value, with_lse=True)
        natural = lse.view(query.shape[:3]) * math.log(2)
        for items, rows in self.cleared:
            natural[items, rows] = float("-inf")
        return output, natural.transpose(1, 2).contiguous()

    def _run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output = query.new_empty(query.shape)
        answered = output
        if self.used is not None:
            queries, keys = self.used
            query, key, value, answered = (
                query[:, :queries],
                key[:, :keys],
                value[:, :keys],
                output[:, :queries],
            )
        key_TGD, value_TGD = self.rows(key), self.rows(value)
        if self.key_index is not None:
            key_TGD, value_TGD = key_TGD[self.key_index], value_TGD[self.key_index]
        scale = None
        if self.fp8_values:
            value_TGD, scale = quantise_values(value_TGD)
        out_THD = answered.flatten(0, 1)
        result = self.run(self.rows(query), key_TGD, value_TGD, out=out_THD, return_lse=with_lse)
        if scale is not None:
            out_THD.mul_(scale)
        for items, rows in self.cleared:
            output[items, rows] = 0.0
        return output, result[1] if with_lse else output


_Key = tuple[FlashInferKernel, RaggedShape, torch.dtype, torch.device]
_plans: OrderedDict[_Key, Plan] = OrderedDict()
_plans_lock = threading.Lock()
_captured: set[Plan] = set()
_workspaces: dict[torch.device, torch.Tensor] = {}


def find_plan(
    kernel: FlashInferKernel, shape: RaggedShape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Plan:
    """The plan of a call, made where none is kept.

    Raises:
        MetadataError: there is none and a CUDA graph is being captured, or the call is too large for the kernel.
    """
    check_views(kernel, query, key, value)  # first: a plan that is kept has passed
    wanted = (kernel, shape, query.dtype, query.device)
    with _plans_lock:
        plan = _plans.get(wanted)
        if plan is None:
            if is_capturing(query):
                raise MetadataError(
                    f"FLASHINFER_ATTN ({kernel.variant}) cannot plan inside a CUDA-graph capture, where the first call "
                    f"of batch {shape.batch}, lengths {shape.lengths}, {query.dtype} lies: run it once before capturing"
                )
            plan = _plans[wanted] = make_plan(kernel, shape, query.dtype, query.device)
            if len(_plans) > KEPT_PLANS:
                _plans.popitem(last=False)
        _plans.move_to_end(wanted)
    return plan


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured on the tensor's device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def keep_captured(plan: Plan) -> None:
    """Keeps a plan for good: a captured graph knows its buffers by address only."""
    _captured.add(plan)


def make_plan(kernel: FlashInferKernel, shape: RaggedShape, dtype: torch.dtype, device: torch.device) -> Plan:
    """A new plan. Copies boundaries to the device, and reads nothing back.

    Raises:
        MetadataError: more tokens than int32 counts.
    """
    sequences = shape.sequences
    cu_q, cu_k = ([0, *accumulate(side)] for side in zip(*sequences, strict=True))
    check_token_count("FLASHINFER_ATTN", max(cu_q[-1], cu_k[-1]))
    key_index = None
    if shape.kv_lengths is not None:
        kept = [torch.arange(n) + item * shape.lengths[1] for item, n in enumerate(shape.kv_lengths)]
        key_index = torch.cat(kept).to(device, non_blocking=True)
    cleared = shape.rows_without_key
    return Plan(
        run=_planned_run(kernel, shape, cu_q, cu_k, dtype, device),
        rows=contiguous_rows if kernel.variant == "cute-dsl" else strided_rows,
        is_plain=not (cleared or shape.segments or shape.kv_lengths or shape.fp8_values),
        used=shape.used,
        key_index=key_index,
        cleared=cleared,
        fp8_values=shape.fp8_values,
    )


def _planned_run(
    kernel: FlashInferKernel,
    shape: RaggedShape,
    cu_q: list[int],
    cu_k: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[..., Any]:
    boundaries_q, boundaries_k = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))
    if kernel.variant == "cute-dsl":
        on_device_k = boundaries_k.to(device, non_blocking=True)
        return partial(
            kernel.ragged,
            workspace_buffer=torch.empty(0, dtype=torch.uint8, device=device),  # this backend uses none
            seq_lens=on_device_k[1:] - on_device_k[:-1],
            max_q_len=max(queries for queries, _ in shape.sequences),
            max_kv_len=max(keys for _, keys in shape.sequences),
            bmm1_scale=shape.softmax_scale,
            bmm2_scale=1.0,  # host numbers only: the values' scale, known to the device, goes onto the output
            o_sf_scale=-1.0,
            batch_size=len(shape.sequences),
            window_left=-1,
            cum_seq_lens_q=boundaries_q.to(device, non_blocking=True),
            cum_seq_lens_kv=on_device_k,
            enable_pdl=None,
            is_causal=shape.causal,
            return_lse=False,
            backend="cute-dsl",
        )
    wrapper = kernel.ragged(shared_workspace(device), "NHD", backend=kernel.variant)
    wrapper.plan(
        boundaries_q,
        boundaries_k,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_size,
        causal=shape.causal,
        window_left=shape.window_left,
        sm_scale=shape.softmax_scale,
        q_data_type=dtype,
    )
    run: Callable[..., Any] = wrapper.run
    return run


def shared_workspace(device: torch.device) -> torch.Tensor:
    """The float workspace of all plans of a device."""
    if device not in _workspaces:
        _workspaces[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[device]
