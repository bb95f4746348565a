"""Stand-ins for the SageAttention packages: their calling conventions, what goes wrong in them, reference numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from omni_attn.ops.reference import reference_attention
from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.log import CallLog

QUERY_TILE, KEY_TILE = 128, 64


@contextmanager
def sage_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the module of a generation in place."""
    if variant == "sage1":
        functions: dict[str, Any] = {"sageattn": Sage1StandIn(log).sageattn}
    else:
        newer = Sage2StandIn(log)
        functions = {"sageattn": newer.sageattn, "sageattn_qk_int8_pv_fp16_triton": newer.sageattn}
    with fake_package("sageattention", **functions):
        yield


@contextmanager
def sage3_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the module of SageAttention 3 in place."""
    with fake_package("sageattn3", sageattn3_blackwell=Sage3StandIn(log).sageattn3_blackwell):
        yield


class Sage1StandIn:
    """sageattn of SageAttention 1.0.6, with what its Triton kernels do beyond attention.

    smooth_k centres the caller's keys in place. Keys that are missing in the last tile of 64 count with score 0 and
    value 0. The causal kernel takes equal lengths, aligns at the top left, and reads a scale behind the last one where
    the last tile of 128 queries covers a single tile of keys (NaN here).
    """

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def sageattn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: float | None = None,
        smooth_k: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Output in the layout of q."""
        self.log.calls.append("sageattn")
        _check_tensors(q, k, v, tensor_layout)
        assert q.shape[-1] in (64, 96, 128), "headdim should be in [64, 96, 128]."
        if smooth_k:
            k -= k.mean(dim=1, keepdim=True)
        if not is_causal:
            missing = (0, 0, 0, 0, 0, -k.shape[1] % KEY_TILE)
            output = reference_attention(q, F.pad(k, missing), F.pad(v, missing), softmax_scale=sm_scale)[0]
            return output.to(q.dtype)
        assert q.shape[1] == k.shape[1], "qo_len and kv_len must be equal for causal attention"
        output = reference_attention(q, k, v, softmax_scale=sm_scale, causal=True)[0].to(q.dtype)
        whole, rest = divmod(q.shape[1], QUERY_TILE)
        if 0 < rest <= KEY_TILE:
            output[:, whole * QUERY_TILE :] = float("nan")
        return output


class Sage2StandIn:
    """sageattn of SageAttention 2: head sizes padded to 64 or 128, causal aligned at the top left, NaN below one block.

    It takes any further keyword, and drops it.
    """

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def sageattn(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tensor_layout: str = "HND",
        is_causal: bool = False,
        sm_scale: float | None = None,
        return_lse: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Output in the layout of q; a strided view of it where the head size was padded."""
        self.log.calls.append("sageattn")
        _check_tensors(q, k, v, tensor_layout)
        assert not return_lse and not kwargs, f"dropped: {sorted(kwargs)}"
        head_size = q.shape[-1]
        if head_size > 128:
            raise ValueError(f"Unsupported head_dim: {head_size}")
        scale = head_size**-0.5 if sm_scale is None else sm_scale
        top_left = None
        if is_causal:
            top_left = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()[
                None, None
            ]
        output = reference_attention(q, k, v, softmax_scale=scale, attn_mask=top_left)[0]
        output = F.pad(output.to(q.dtype), (0, (64 if head_size <= 64 else 128) - head_size))
        if q.shape[1] < QUERY_TILE or k.shape[1] < KEY_TILE:
            output.fill_(float("nan"))
        return output[..., :head_size]


class Sage3StandIn:
    """sageattn3_blackwell: [B, H, S, D], equal head counts, its own scale, keys centred in place, no masks.

    From head size 256 on it runs torch's attention instead, which no caller of ours may get.
    """

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def sageattn3_blackwell(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        per_block_mean: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Output [B, H, Sq, D]."""
        self.log.calls.append("sageattn3_blackwell")
        assert attn_mask is None and not kwargs, "masks and further keywords are dropped"
        assert q.shape[-1] in (64, 128), f"head size {q.shape[-1]} has no FP4 kernel"
        assert q.shape[1] == k.shape[1] == v.shape[1], "We do not support MQA/GQA yet"
        assert q.dtype == k.dtype == v.dtype and not is_causal
        k -= k.mean(dim=-2, keepdim=True)
        output = reference_attention(*(x.transpose(1, 2) for x in (q, k, v)))[0]
        return output.transpose(1, 2).to(q.dtype).contiguous()


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensor_layout: str) -> None:
    assert tensor_layout == "NHD", "these stand-ins know one layout, [B, S, H, D]"
    assert q.dtype == k.dtype == v.dtype, "All tensors must have the same dtype."
    assert all(x.stride(-1) == 1 for x in (q, k, v)), "Last dim of qkv must be contiguous."
    assert k.shape == v.shape and q.shape[-1] == k.shape[-1]
    assert q.shape[2] % k.shape[2] == 0, f"{q.shape[2]} query heads over {k.shape[2]} key heads"
    assert q.shape[1] > 0 and k.shape[1] > 0, "an empty sequence has no grid to launch"
