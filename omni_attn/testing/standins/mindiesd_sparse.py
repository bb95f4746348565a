"""A stand-in for the sparse attention of MindIE-SD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

import torch

from omni_attn.ops.block_sparse.rainfusion import RainFusionLayout, rainfusion_blocks
from omni_attn.ops.block_sparse.torch_executor import TorchExecutor
from omni_attn.ops.rainfusion import rainfusion_attention
from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.log import CallLog


@contextmanager
def mindie_sparse_stand_in(log: CallLog, variant: str | None) -> Iterator[None]:
    """Puts the module in place."""
    with fake_package("mindiesd", sparse_attention=MindieSparseStandIn(log).sparse_attention):
        yield


class MindieSparseStandIn:
    """sparse_attention of MindIE-SD: blocks of 128, equal heads, one video behind a prefix or a list of videos.

    Keywords that it does not know are swallowed, as the package does. Numbers are those of our own rules.
    """

    def __init__(self, log: CallLog) -> None:
        self.log = log

    def sparse_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        head_num: int = 1,
        input_layout: str = "BNSD",
        inner_precise: int = 0,
        sparse_type: str | None = None,
        txt_len: int = 0,
        block_size: int = 128,
        latent_shape_q: Sequence[int] | None = None,
        latent_shape_k: Sequence[int] | None = None,
        video_spans: Sequence[Mapping[str, object]] | None = None,
        sparsity: float = 0.0,
        precision: str = "bf16",
        **kwargs: object,
    ) -> torch.Tensor:
        """Output [B, S, H, D] of BSND inputs."""
        self.log.calls.append(f"sparse_attention {sparse_type} {precision}")
        assert input_layout == "BSND" and block_size == 128 and not is_causal and attn_mask is None
        assert q.shape == k.shape == v.shape and head_num == q.shape[2], "equal heads and lengths"
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        assert (sparse_type, inner_precise) == (("rf_v2", 0) if precision == "bf16" else ("rf_v3", 4))
        assert not kwargs, f"swallowed: {kwargs}"
        if video_spans is None:
            assert latent_shape_q is not None and latent_shape_q == latent_shape_k
            assert txt_len + prod(latent_shape_q) == q.shape[1]
            spans = [{"start": txt_len, "latent_shape": latent_shape_q}]
        else:
            assert txt_len == 0 and latent_shape_q is latent_shape_k is None
            spans = [dict(span) for span in video_spans]
        layout = RainFusionLayout(
            q.shape[1],
            tuple((span["start"], tuple(span["latent_shape"])) for span in spans),  # type: ignore[arg-type,misc]
        )
        blocks = rainfusion_blocks(layout, block_size, q.device)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return rainfusion_attention(TorchExecutor(), q, k, v, blocks, sparsity, scale)
