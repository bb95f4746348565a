"""Stand-ins for FlashInfer's TRT-LLM kernels, in the calling conventions of two releases and of one in between."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from omni_attn.ops.reference import reference_attention
from omni_attn.ops.skip_softmax import skip_softmax_attention
from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.sage_quantise import dequantise, sage_quantise

# mirrors: FlashInfer 0.6.18. flag: 0.6.18.post1. old: a build before 0.6.18, with neither way to say that no sequence
# is empty, and a quantiser that knows no sequences.
MODULE = "flashinfer.prefill"
APIS = ("mirrors", "flag", "old")
# Rows that vote together and keys that are skipped together; the real kernels have sizes of their own.
TILE = 8


@contextmanager
def trtllm_stand_in(log: CallLog, variant: str | None, api: str = "mirrors") -> Iterator[None]:
    """Puts flashinfer.prefill in place."""
    kernel = TrtllmStandIn(log, api == "old")
    functions: dict[str, Any] = {
        "trtllm_ragged_attention_deepseek": getattr(kernel, f"ragged_{api}"),
        "trtllm_sage_attention_quantize": kernel.quantise_old if api == "old" else kernel.quantise,
        "trtllm_fmha_v2_prefill": kernel.fmha_v2,
    }
    own = functions.items() if variant is None else [i for i in functions.items() if _is_of(variant, i[0])]
    # Both variants live in one module: what another stand-in has put there stays.
    there = {name: f for name in functions if (f := getattr(sys.modules.get(MODULE), name, None))}
    with fake_package(MODULE, **there | dict(own)):
        yield


def _is_of(variant: str, function: str) -> bool:
    return (function == "trtllm_fmha_v2_prefill") == (variant == "fmha_v2")


class TrtllmStandIn:
    """The three functions; float32 is taken as well, so that a result can be held against a reference closely.

    Like the real ones: contiguous [T, H, D], int32 boundaries, a zeroed workspace, rows that are not written (NaN
    here), NaN for a quantised sequence below one block, and undefined behaviour (an assertion here) for an empty
    sequence whose check was skipped.
    """

    def __init__(self, log: CallLog, is_old: bool = False) -> None:
        self.log = log
        #: Blocks of scales run over all tokens, as they did before 0.6.18.
        self.is_old = is_old

    def ragged_mirrors(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        workspace_buffer: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int,
        max_kv_len: int,
        bmm1_scale: float,
        bmm2_scale: float,
        o_sf_scale: float,
        batch_size: int,
        window_left: int,
        cum_seq_lens_q: torch.Tensor,
        cum_seq_lens_kv: torch.Tensor,
        enable_pdl: bool | None,
        is_causal: bool,
        return_lse: bool,
        attention_sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        sage_attn_sfs: tuple[torch.Tensor | None, ...] = (None,) * 4,
        num_elts_per_sage_attn_blk: tuple[int, ...] = (0,) * 4,
        backend: str = "trtllm-gen",
        q_seq_lens_cpu: torch.Tensor | None = None,
        kv_seq_lens_cpu: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """0.6.18: without lengths on the host it looks at the boundaries itself."""
        if query.is_meta:
            return torch.empty_like(query)
        empty = _has_empty(cum_seq_lens_q, cum_seq_lens_kv)
        mirrors = (
            (q_seq_lens_cpu, cum_seq_lens_q, query, max_q_len),
            (kv_seq_lens_cpu, cum_seq_lens_kv, key, max_kv_len),
        )
        for mirror, boundaries, tensor, longest in mirrors:
            if mirror is not None:
                assert mirror.device.type == "cpu" and mirror.tolist() == boundaries.diff().tolist()
                assert int(mirror.sum()) == len(tensor) and int(mirror.max()) <= longest
        assert (q_seq_lens_cpu is None) == (kv_seq_lens_cpu is None), "both mirrors or none"
        scales = any(scale is not None for scale in sage_attn_sfs)
        assert not (empty and scales), "empty sequences cannot be left out beside SAGE scales"
        assert (enable_pdl, return_lse, window_left, o_sf_scale) == (False, False, -1, -1.0)
        assert backend == "trtllm-gen" and bmm2_scale == 1.0 and isinstance(bmm1_scale, float)
        self.log.calls.append("trtllm_ragged_attention_deepseek")
        assert query.shape[-1] == key.shape[-1] == value.shape[-1], "one head size"
        blocks = None
        if scales:
            assert not is_causal, "SAGE kernels are not causal"
            assert num_elts_per_sage_attn_blk[2:] == (0, 1)
            blocks = (num_elts_per_sage_attn_blk[0], num_elts_per_sage_attn_blk[1])
            bounds = (cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist())
            if self.is_old:
                bounds = ([0, len(query)], [0, len(key)])
            query, key, value = dequantise((query, key, value), sage_attn_sfs, blocks, bounds)
        return self._attend(
            (query, key, value),
            (workspace_buffer, 394 * 2**20),
            (seq_lens, cum_seq_lens_q, cum_seq_lens_kv, batch_size, max_q_len, max_kv_len),
            bmm1_scale,
            is_causal,
            skip_softmax_threshold_scale_factor,
            blocks,
        )

    def ragged_flag(
        self, *arguments: Any, skip_all_rows_active_check: bool = False, **named: Any
    ) -> torch.Tensor:
        """0.6.18.post1: a caller who knows that no sequence is empty says so."""
        if skip_all_rows_active_check and not arguments[0].is_meta:
            assert not _has_empty(arguments[12], arguments[13]), "undefined behaviour"
        assert "q_seq_lens_cpu" not in named
        return self.ragged_mirrors(*arguments, **named)

    def ragged_old(
        self,
        *arguments: Any,
        skip_softmax_threshold_scale_factor: float | None = None,
        sage_attn_sfs: tuple[torch.Tensor | None, ...] = (None,) * 4,
        num_elts_per_sage_attn_blk: tuple[int, ...] = (0,) * 4,
    ) -> torch.Tensor:
        """Before 0.6.18: nothing looks for empty sequences."""
        options: dict[str, Any] = {
            "skip_softmax_threshold_scale_factor": skip_softmax_threshold_scale_factor,
            "sage_attn_sfs": sage_attn_sfs,
            "num_elts_per_sage_attn_blk": num_elts_per_sage_attn_blk,
        }
        return self.ragged_mirrors(*arguments, **options)

    def quantise(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        q_block_size: int = 1,
        k_block_size: int = 16,
        qk_quant_dtype: torch.dtype = torch.int8,
        cum_seq_lens_q: torch.Tensor | None = None,
        cum_seq_lens_kv: torch.Tensor | None = None,
        smooth_k: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """0.6.18: blocks of each sequence, and the mean of the keys as a seventh result."""
        assert cum_seq_lens_q is not None and cum_seq_lens_kv is not None, "blocks would straddle sequences"
        assert smooth_k, "keys are always smoothed"
        bounds = (cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist())
        mean = key.float().mean(0, keepdim=True)
        made = sage_quantise(
            (query, (key.float() - mean).to(key.dtype), value),
            (q_block_size, k_block_size),
            qk_quant_dtype,
            bounds,
        )
        self.log.calls.append("trtllm_sage_attention_quantize")
        return (*made, mean[0])

    def quantise_old(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        q_block_size: int = 1,
        k_block_size: int = 16,
        qk_quant_dtype: torch.dtype = torch.int8,
    ) -> tuple[torch.Tensor, ...]:
        """Before 0.6.18: blocks over all tokens, and keys as they are."""
        limit = 4 * key.float().std().item() / len(key) ** 0.5
        assert key.float().mean(0).abs().max().item() <= limit, "keys are smoothed before"
        bounds = ([0, len(query)], [0, len(key)])
        self.log.calls.append("trtllm_sage_attention_quantize")
        return sage_quantise((query, key, value), (q_block_size, k_block_size), qk_quant_dtype, bounds)

    def fmha_v2(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        input_layout: str,
        workspace_buffer: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: int,
        max_kv_len: int,
        bmm1_scale: float,
        bmm2_scale: float,
        batch_size: int,
        cum_seq_lens_q: torch.Tensor,
        cum_seq_lens_kv: torch.Tensor,
        block_tables: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        mask_mode: str = "causal",
        window_left: int = -1,
        skip_softmax_threshold_scale_factor: float = 0,
    ) -> torch.Tensor:
        """Separate queries, keys and values; "padding" is its word for bidirectional."""
        if qkv[0].is_meta:
            return torch.empty_like(qkv[0])
        assert input_layout == "SEPARATE_Q_K_V" and mask_mode in ("padding", "causal")
        assert isinstance(bmm1_scale, float) and bmm2_scale == 1.0 and window_left == -1
        assert isinstance(skip_softmax_threshold_scale_factor, float), "a C++ float: None is refused"
        assert torch.equal(cum_seq_lens_q, cum_seq_lens_kv), "reads out of bounds with more keys than queries"
        self.log.calls.append("trtllm_fmha_v2_prefill")
        return self._attend(
            qkv,
            (workspace_buffer, 2**20),
            (seq_lens, cum_seq_lens_q, cum_seq_lens_kv, batch_size, max_q_len, max_kv_len),
            bmm1_scale,
            mask_mode == "causal",
            skip_softmax_threshold_scale_factor,
            None,
        )

    def _attend(
        self,
        qkv: tuple[torch.Tensor, ...],
        workspace: tuple[torch.Tensor, int],
        lengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int],
        scale: float,
        causal: bool,
        factor: float | None,
        blocks: tuple[int, int] | None,
    ) -> torch.Tensor:
        buffer, least = workspace
        assert buffer.dtype == torch.uint8 and len(buffer) >= least and not buffer[:64].any()
        seq_lens, cu_q, cu_k, batch_size, max_q, max_k = lengths
        query, key, value = qkv
        for tensor in qkv:
            assert tensor.dim() == 3 and tensor.is_contiguous() and tensor.dtype == query.dtype
        assert query.shape[1] % key.shape[1] == 0 and key.shape == value.shape
        for boundaries in (cu_q, cu_k):
            assert boundaries.dtype == torch.int32 and boundaries.shape == (batch_size + 1,)
        assert seq_lens.dtype == torch.int32 and torch.equal(seq_lens, cu_k.diff())
        output = query.new_full(query.shape, float("nan"))
        for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            assert b - a <= max_q and d - c <= max_k, "longest sequences"
            assert not causal or b - a <= d - c, "more queries than keys"
            if b == a or d == c:
                continue
            if blocks is not None and (b - a < blocks[0] or d - c < blocks[1]):
                continue  # NaN stays
            part = query[None, a:b], key[None, c:d], value[None, c:d]
            options: dict[str, Any] = {"softmax_scale": scale, "causal": causal}
            if factor:
                options |= {"threshold": factor / (d - c), "tile_queries": TILE, "tile_keys": TILE}
                output[a:b] = skip_softmax_attention(*part, **options)[0][0].to(query.dtype)
            else:
                output[a:b] = reference_attention(*part, **options)[0][0].to(query.dtype)
        return output


def _has_empty(cu_q: torch.Tensor, cu_k: torch.Tensor) -> bool:
    return bool((cu_q.diff() == 0).any() or (cu_k.diff() == 0).any())
