"""Policy for NVIDIA GPUs: one default order per compute capability, by expected key length."""

from __future__ import annotations

from omni_attn.facts import AttentionRequest
from omni_attn.platforms.interface import OmniPlatform, OrderRow

_FLASH_FIRST = ("FLASH_ATTN", "CUDNN_ATTN", "TORCH_SDPA")
_CUDNN_FIRST = ("CUDNN_ATTN", "FLASH_ATTN", "TORCH_SDPA")
_FA3 = ("FLASH_ATTN", "fa3")

# Ampere and Ada: FlashAttention 2 is what torch's own flash kernel descends from, with packing and windows beside it.
# Not measured by us; cuDNN is left out until it is. On Turing FLASH_ATTN's facts leave TORCH_SDPA.
_AMPERE = (OrderRow(("FLASH_ATTN", "TORCH_SDPA")),)

# Hopper, by benchmarks/dense.py on an H200 (2026-11-30, torch 2.11, cuDNN 9.19, tokenspeed-fa3 3.0.0, bf16, TFLOP/s,
# FlashAttention 3 : cuDNN):
#   32760 x 32760, 12 heads, D 128   687 : 557        75600 x 75600, 40 heads, D 128   677 : 563
#   32760 x 512, 40 heads, D 128     523 : 541        4608 x 4608, 24 heads, D 128     503 : 552
# Without a hint the long case decides, since that is where the time goes. FlashAttention 2 is the kernel that torch's
# own dispatcher ranks behind cuDNN here, so where version 3 is missing or cannot serve the layer cuDNN goes first.
_HOPPER = (
    OrderRow(_FLASH_FIRST, min_key_tokens=8192, needs=_FA3),
    OrderRow(_FLASH_FIRST, min_key_tokens=None, needs=_FA3),
    OrderRow(_CUDNN_FIRST),
)

# Blackwell: published comparisons put cuDNN first among the exact kernels that torch brings. Not measured by us.
_BLACKWELL = (OrderRow(_CUDNN_FIRST),)

_ORDERS = (((10, 0), _BLACKWELL), ((9, 0), _HOPPER), ((0, 0), _AMPERE))


class CudaPlatform(OmniPlatform):
    """NVIDIA GPUs."""

    def default_order(self, request: AttentionRequest) -> tuple[str, ...]:
        """See OmniPlatform.default_order."""
        capability = self.device.capability or (0, 0)
        rows = next(rows for minimum, rows in _ORDERS if capability >= minimum)
        return self.first_order(rows, request)
