"""A stand-in for FlashInfer: the ragged wrapper, the function for one masked sequence, and the cute-dsl function."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import torch

from omni_attn.ops.reference import reference_attention
from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.flashinfer_paged import paged_wrappers
from omni_attn.testing.standins.log import CallLog

_HEAD_SIZES = (64, 128, 256)


@contextmanager
def flashinfer_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the modules of all variants in place, as a newer version has them."""
    functions = FlashInferStandIn(log)
    wrapper = type("BatchPrefillWithRaggedKVCacheWrapper", (RaggedWrapperStandIn,), {"log": log})
    modules: dict[str, dict[str, Any]] = {
        "flashinfer": {
            "BatchPrefillWithRaggedKVCacheWrapper": wrapper,
            "single_prefill_with_kv_cache": functions.single_prefill_with_kv_cache,
            **paged_wrappers(log),
        },
        "flashinfer.prefill": {
            "trtllm_ragged_attention_deepseek": functions.trtllm_ragged_attention_deepseek
        },
        "flashinfer.attention.cute_dsl.fmha": {},
    }
    with ExitStack() as stack:
        for name, symbols in modules.items():
            stack.enter_context(fake_package(name, **symbols))
        yield


class RaggedWrapperStandIn:
    """BatchPrefillWithRaggedKVCacheWrapper of fa2 and fa3: planned once from boundaries on the host, run many times.

    A row without a key comes out as NaN: nobody may rely on what a kernel writes there. lse is in base 2.
    """

    log: ClassVar[CallLog]

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and float_workspace_buffer.numel() >= 128 * 2**20
        assert kv_layout == "NHD" and not use_cuda_graph
        assert backend in ("fa2", "fa3"), f"no {backend} behind this stand-in"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        causal: bool = False,
        window_left: int = -1,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | str = "float16",
    ) -> None:
        """Holds for calls between these boundaries, with these heads and this dtype."""
        self.log.plans.append("plan")
        for boundaries in (qo_indptr, kv_indptr):
            assert boundaries.dtype == torch.int32 and boundaries.device.type == "cpu", (
                "a plan reads the host"
            )
        assert len(qo_indptr) == len(kv_indptr) > 1 and num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in _HEAD_SIZES, f"no kernel for head size {head_dim_qk}"
        self._cu_q, self._cu_k = qo_indptr.tolist(), kv_indptr.tolist()
        self._heads, self._kv_heads = (num_qo_heads, head_dim_qk), (num_kv_heads, head_dim_qk)
        self._causal, self._window, self._scale, self._dtype = causal, window_left, sm_scale, q_data_type

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Output [T, H, D], with return_lse also lse [T, H]."""
        self.log.calls.append("run")
        assert q.dtype == k.dtype == v.dtype == self._dtype, f"planned for {self._dtype}, found {q.dtype}"
        assert tuple(q.shape) == (self._cu_q[-1], *self._heads), f"planned otherwise: {tuple(q.shape)}"
        assert tuple(k.shape) == tuple(v.shape) == (self._cu_k[-1], *self._kv_heads)
        for tensor in (q, k, v):
            assert tensor.stride(-1) == 1, "the last dimension needs unit stride"
        window = None if self._window < 0 else (self._window, -1)
        positions = {"softmax_scale": self._scale, "causal": self._causal, "window": window}
        return _ragged(q, k, v, self._cu_q, self._cu_k, out, return_lse, positions)


class FlashInferStandIn:
    """The two functions that need no plan."""

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def single_prefill_with_kv_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        packed_custom_mask: torch.Tensor | None = None,
        sm_scale: float | None = None,
        backend: str = "auto",
    ) -> torch.Tensor:
        """Output [Sq, H, D] of one sequence under a mask of bits, first key in the lowest; fa2 alone has masks."""
        self.log.calls.append("single_prefill_with_kv_cache")
        assert backend == "fa2" and packed_custom_mask is not None and q.shape[-1] in _HEAD_SIZES
        assert q.dim() == k.dim() == v.dim() == 3 and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        size = q.shape[0] * k.shape[0]
        assert packed_custom_mask.dtype == torch.uint8 and packed_custom_mask.is_contiguous()
        assert tuple(packed_custom_mask.shape) == ((size + 7) // 8,), "one bit per query and key"
        bits = (packed_custom_mask[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        mask = bits.flatten()[:size].bool().view(1, 1, q.shape[0], k.shape[0])
        output, lse = reference_attention(q[None], k[None], v[None], softmax_scale=sm_scale, attn_mask=mask)
        return _poisoned(output[0], lse[0]).to(q.dtype)

    def trtllm_ragged_attention_deepseek(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        workspace_buffer: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int,
        max_kv_len: int,
        bmm1_scale: float | torch.Tensor,
        bmm2_scale: float | torch.Tensor,
        o_sf_scale: float,
        batch_size: int,
        window_left: int,
        cum_seq_lens_q: torch.Tensor,
        cum_seq_lens_kv: torch.Tensor,
        enable_pdl: bool | None,
        is_causal: bool,
        return_lse: bool,
        out: torch.Tensor | None = None,
        backend: str = "trtllm-gen",
    ) -> Any:
        """The cute-dsl kernel: contiguous inputs of 128 channels, 16-bit queries and keys, also fp8 values."""
        self.log.calls.append("trtllm_ragged_attention_deepseek")
        assert backend == "cute-dsl" and window_left == -1
        assert not isinstance(bmm1_scale, torch.Tensor) and not isinstance(bmm2_scale, torch.Tensor)
        assert query.dtype == key.dtype and value.dtype in (query.dtype, torch.float8_e4m3fn)
        for tensor in (query, key, value):
            assert tensor.dim() == 3 and tensor.is_contiguous() and tensor.shape[-1] == 128
        if query.is_meta:  # shapes alone: one sequence will do
            return torch.empty_like(query)
        cu_q, cu_k = cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist()
        lengths_q, lengths_k = ([b - a for a, b in pairwise(cu)] for cu in (cu_q, cu_k))
        assert cum_seq_lens_q.dtype == cum_seq_lens_kv.dtype == seq_lens.dtype == torch.int32
        assert len(lengths_q) == batch_size and lengths_k == seq_lens.tolist()
        assert (max(lengths_q), max(lengths_k)) == (max_q_len, max_kv_len) and min(lengths_q + lengths_k) > 0
        assert not is_causal or lengths_q == lengths_k
        assert out is None or out.data_ptr() % 32 == 0, "the kernel stores 256 bits at once"
        assert (cu_q[-1], cu_k[-1]) == (query.shape[0], key.shape[0])
        positions = {"softmax_scale": bmm1_scale, "causal": is_causal}
        values = value.to(query.dtype) * bmm2_scale
        return _ragged(query, key, values, cu_q, cu_k, out, return_lse, positions)


def _ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: list[int],
    cu_k: list[int],
    out: torch.Tensor | None,
    return_lse: bool,
    positions: dict[str, Any],
) -> Any:
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        part = reference_attention(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **positions)
        out[q0:q1] = _poisoned(part[0][0], part[1][0]).to(q.dtype)
        lse[q0:q1] = part[1][0].T / math.log(2)
    return (out, lse) if return_lse else out


def _poisoned(output_SHD: torch.Tensor, lse_HS: torch.Tensor) -> torch.Tensor:
    return output_SHD.masked_fill(lse_HS.T.isneginf()[..., None], float("nan"))
