"""Stand-ins for FlashInfer's block-sparse functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from omni_attn.backends import capability
from omni_attn.testing.packages import fake_package
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.sparse_listed import attend_listed, block_rows


@contextmanager
def sparse_flashinfer_stand_in(log: CallLog, major: int = 10) -> Iterator[None]:
    """Puts the modules in place, on a GPU of a compute capability."""
    with ExitStack() as stack:
        for module, function, unit, gqa, own_major in (
            ("bsa_attn_sm100_blk64", "bsa_attn_sm100_blk64_fwd", 64, False, 10),
            ("bsa_attn_sm100_blk128", "bsa_attn_sm100_blk128_fwd", 128, True, 10),
            ("bsa_attn_sm120", "bsa_attn_sm120_blk64_fwd", 64, True, 12),
        ):
            symbols: dict[str, Any] = {function: _kernel(log, function, unit, gqa, own_major == major)}
            stack.enter_context(fake_package(f"flashinfer.cute_dsl.sparse.{module}", **symbols))
        stack.enter_context(patch.object(capability, "capability_major", lambda device: major))
        yield


def _kernel(
    log: CallLog, name: str, unit: int, gqa: bool, runs_here: bool
) -> Callable[..., tuple[torch.Tensor, None]]:
    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q2k_block_index: torch.Tensor,
        block_sparse_num: int,
        block_sizes: torch.Tensor | None = None,
        q2k_block_nums: torch.Tensor | None = None,
        *,
        softmax_scale: float | None = None,
        pack_gqa: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """[B, S, H, 128] over lists of blocks; without a log-sum-exp nobody asked for."""
        log.calls.append(name)
        assert runs_here, f"{name} is for another generation of GPUs"
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 128, "head size 128"
        assert q.dtype == k.dtype == v.dtype and all(x.stride(-1) == 1 for x in (q, k, v))
        assert block_sizes is not None and q2k_block_nums is not None and softmax_scale is not None
        assert block_sparse_num >= 1
        if not gqa:
            assert q.shape[2] == k.shape[2], "no grouped heads"
        if unit == 128:
            assert pack_gqa is False, "packed heads share one list"
        else:
            assert pack_gqa is None, f"{name} has no such argument"
        assert q.shape[1] % unit == 0 and k.shape[1] % unit == 0
        blocks = (q.shape[1] // unit, k.shape[1] // unit)
        key_rows = block_rows(q2k_block_index, q2k_block_nums, block_sizes, unit, blocks)
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        output = attend_listed(query, key, value, unit, key_rows, softmax_scale)
        return output.transpose(1, 2).contiguous(), None

    return kernel
