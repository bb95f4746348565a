"""A stand-in for FastVideo's block-sparse kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.sparse_listed import attend_listed, block_rows

_UNIT = 64


@contextmanager
def sparse_fastvideo_stand_in(log: CallLog) -> Iterator[None]:
    """Puts the module in place."""

    def block_sparse_attn_from_indices(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q2k_idx: torch.Tensor,
        q2k_num: torch.Tensor,
        variable_block_sizes: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, H, S, D] over blocks of 64, scaled by D ** -0.5; the log-sum-exp beside it is no use to anybody here."""
        log.calls.append("block_sparse_attn_from_indices")
        assert q.shape[:2] == k.shape[:2] == v.shape[:2], "no grouped heads"
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] in (64, 128), "head size 64 or 128"
        assert q.shape[2] % _UNIT == 0 and k.shape[2] % _UNIT == 0, "whole blocks of 64"
        blocks = (q.shape[2] // _UNIT, k.shape[2] // _UNIT)
        key_rows = block_rows(q2k_idx, q2k_num, variable_block_sizes, _UNIT, blocks)
        output = attend_listed(q, k, v, _UNIT, key_rows, q.shape[-1] ** -0.5)
        return output, q.new_empty(q.shape[:3], dtype=torch.float32)

    with fake_package("fastvideo_kernel", block_sparse_attn_from_indices=block_sparse_attn_from_indices):
        yield
