"""Stand-in kernels on the CPU: the real calling conventions and quirks, reference numbers, counted calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from omni_attn.testing.standins.aiter import aiter_stand_in
from omni_attn.testing.standins.aiter_quant import aiter_quant_stand_in
from omni_attn.testing.standins.cudnn import cudnn_stand_in
from omni_attn.testing.standins.flash import flash_stand_in
from omni_attn.testing.standins.flashinfer import flashinfer_stand_in
from omni_attn.testing.standins.flex import flex_stand_in
from omni_attn.testing.standins.log import CallLog
from omni_attn.testing.standins.mate import mate_stand_in
from omni_attn.testing.standins.mindiesd import mindie_stand_in
from omni_attn.testing.standins.mindiesd_sparse import mindie_sparse_stand_in
from omni_attn.testing.standins.sage import sage3_stand_in, sage_stand_in
from omni_attn.testing.standins.sparse import sparse_stand_in
from omni_attn.testing.standins.trtllm import trtllm_stand_in
from omni_attn.testing.standins.xpu import xpu_stand_in

# Backends that need one; TORCH_SDPA runs as it is.
_StandIn = Callable[[CallLog, str | None], AbstractContextManager[None]]
_STAND_INS: Mapping[str, _StandIn] = {
    "AITER_QUANT_ATTN": aiter_quant_stand_in,
    "BLOCK_SUMMARY_ATTN": sparse_stand_in,
    "CUDNN_ATTN": cudnn_stand_in,
    "FASTVIDEO_VSA": sparse_stand_in,
    "FLASH_ATTN": flash_stand_in,
    "FLEX_ATTN": flex_stand_in,
    "FLASHINFER_ATTN": flashinfer_stand_in,
    "RAINFUSION_ATTN": sparse_stand_in,
    "SAGE_ATTN": sage_stand_in,
    "SAGE_ATTN_3": sage3_stand_in,
    "TRTLLM_ATTN": trtllm_stand_in,
}
# The variants that other device families have of a name, where their kernels are others' too.
_FAMILY_STAND_INS: Mapping[tuple[str, str | None], _StandIn] = {
    ("FLASH_ATTN", "aiter"): aiter_stand_in,
    ("FLASH_ATTN", "mate"): mate_stand_in,
    ("FLASH_ATTN", "mindiesd"): mindie_stand_in,
    ("FLASH_ATTN", "vllm-xpu-kernels"): xpu_stand_in,
    ("RAINFUSION_ATTN", "mindiesd"): mindie_sparse_stand_in,
}


@contextmanager
def fake_kernels(backend: str, variant: str | None = None) -> Iterator[CallLog]:
    """Stand-in kernels behind a built-in backend's real classes.

    Args:
        backend: public name; variant: which of its variants, those of other device families included.

    Yields:
        The log of kernel calls.
    """
    log = CallLog()
    stand_in = _FAMILY_STAND_INS.get((backend, variant)) or _STAND_INS.get(backend)
    if stand_in is None:
        yield log
        return
    with stand_in(log, variant):
        yield log
