"""Policy for NVIDIA GPUs: one default order per compute capability, by expected key length."""

from __future__ import annotations

from omni_attn.facts import AttentionRequest
from omni_attn.platforms.interface import OmniPlatform, OrderRow

_FLASH_FIRST = ("FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA")
_CUDNN_FIRST = ("CUDNN_ATTN", "FLASH_ATTN", "TORCH_SDPA")
_FA3 = ("FLASH_ATTN", "fa3")
_FA4 = ("FLASH_ATTN", "fa4")

# Ampere and Ada: FlashAttention 2 is what torch's own flash kernel descends from, with packing and windows beside it.
# Not measured by us; cuDNN is left out until it is. On Turing FLASH_ATTN's facts leave TORCH_SDPA.
_AMPERE = (OrderRow(("FLASH_ATTN", "TORCH_SDPA")),)

# Hopper, by benchmarks/dense.py on an H200 (2026-11-30, torch 2.11, cuDNN 9.19, tokenspeed-fa3 3.0.0, flash-attn-4
# 4.0.0b36, bf16, TFLOP/s, FlashAttention 3 : FlashAttention 4 : cuDNN):
#   32760 x 32760, 12 heads, D 128   745 : 721 : 624        75600 x 75600, 40 heads, D 128   664 : 647 : 570
#   4608 x 4608, 24 heads, D 128     697 : 693 : 653        4992 x 4992, 32 heads, D 64      520 : 520 : 464
#   32760 x 512, 40 heads, D 128     611 : 487 : 590
# Version 3 is first throughout, so it leads wherever it serves the layer. Version 4 passes cuDNN on all but short keys.
# FlashAttention 2 is the kernel that torch's own dispatcher ranks behind cuDNN here. FlashInfer's kernels, 3 % ahead of
# version 3 on one shape of nine and behind on the others, compile for minutes at their first use: for the asking.
_HOPPER = (
    OrderRow(_FLASH_FIRST, needs=_FA3),
    OrderRow(_FLASH_FIRST, min_key_tokens=4096, needs=_FA4),
    OrderRow(_FLASH_FIRST, min_key_tokens=None, needs=_FA4),
    OrderRow(_CUDNN_FIRST),
)

# Blackwell: the order that serving engines settled on (TRT-LLM's kernels where no mask can come, then cuDNN, which
# their measurements put far ahead of torch's own choice for masked models). Not measured by us. FlashAttention 4 is the
# only FlashAttention with kernels there; the facts leave the others, and TRT-LLM's outside of 10.x, out.
_BLACKWELL = (OrderRow(("TRTLLM_ATTN", "CUDNN_ATTN", "FLASHINFER_ATTN", "FLASH_ATTN", "TORCH_SDPA")),)

# Over a paged KV cache, measured on an H200 (2026-11-30, torch 2.11, tokenspeed-fa3 3.0.0, flash-attn-4
# 4.0.0b36, flashinfer 0.6.18, bf16, TFLOP/s, 4680 new tokens over 28080 cached, 12 heads, D 128, non-causal), pages of
#   8 tokens      FlashAttention 3: 568   FlashAttention 4: 575   FlashInfer: 527
#   16 tokens                       568                     576               529
#   1560 tokens                     568                     581               528
# Called by our layer, version 4 is within 2 % of version 3 on chunks, 8 % behind it at decode, and compiles for seconds
# at its first call: the variants of FLASH_ATTN come in that order. FlashInfer plans from lengths that a step may know
# on the device alone, and compiles for minutes at its first use: for the asking. Where no FlashAttention has pages
# (before Hopper, and on compute capability 12), our own kernels lead; not measured by us there.
_PAGED = ("FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA")

_ORDERS = (((10, 0), _BLACKWELL), ((9, 0), _HOPPER), ((0, 0), _AMPERE))


class CudaPlatform(OmniPlatform):
    """NVIDIA GPUs."""

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        """See OmniPlatform.default_order."""
        if request.kv_cache is not None:
            return _PAGED
        capability = self.device.capability or (0, 0)
        rows = next(rows for minimum, rows in _ORDERS if capability >= minimum)
        return self.first_order(rows, request)
