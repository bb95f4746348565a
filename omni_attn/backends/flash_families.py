"""What the FLASH_ATTN classes of other device families share: FlashAttention's calls, and rows without a key as zeros.

Their kernels follow FlashAttention's calling convention, but what they write for a query row that sees no key is stated
nowhere. So no such row reaches them where the host knows it, and what they wrote for the others is cleared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from omni_attn.backends.flash_attn import FlashAttentionImpl, FlashMetadata, FlashMetadataBuilder
from omni_attn.backends.flash_kernels import FlashKernel, keep_kernel
from omni_attn.backends.flash_packages import FLASH_CONVENTION, Convention
from omni_attn.backends.metadata import AttentionMetadata
from omni_attn.backends.optional_package import check_keywords, import_symbols
from omni_attn.backends.stated import Packed
from omni_attn.facts import PackageRequirement
from omni_attn.ops.segments import empty_attention

DENSE_KEYWORDS = ("softmax_scale", "causal", "window_size")
VARLEN_KEYWORDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *DENSE_KEYWORDS)


class FamilyFlashBuilder(FlashMetadataBuilder):
    """FLASH_ATTN's builder, which also marks the packed rows that see no key; on the device, without waiting for it."""

    def build(self, record: AttentionMetadata, lengths: tuple[int, int]) -> FlashMetadata:
        """See FlashMetadataBuilder.build."""
        made = super().build(record, lengths)
        if made.packed is None:
            return made
        if made.key_index is not None:  # a padding mask: whole items, neither causal nor windowed
            without_key = (made.packed.cu_seqlens_k.diff() == 0)[:, None, None, None]
            return replace(made, unused_rows=without_key)
        assert made.unused_rows is not None
        return replace(made, unused_rows=made.unused_rows | self._without_key(made.packed, lengths[0]))

    def _without_key(self, packed: Packed, length: int) -> torch.Tensor:
        """True for the tokens [1, T, 1, 1] of packed queries before the first key that they could see."""
        token = torch.arange(length, device=packed.cu_seqlens_q.device, dtype=torch.int32)
        behind = packed.cu_seqlens_q[1:]
        sequence = torch.searchsorted(behind, token, right=True).clamp(max=len(behind) - 1)
        keys_before_end = packed.cu_seqlens_k.diff()[sequence]
        look_ahead = _look_ahead(self.causal, self.window)
        if look_ahead is not None:
            to_the_end = behind[sequence] - 1 - token  # query tokens behind this one
            keys_before_end = torch.where(
                keys_before_end > 0, keys_before_end - to_the_end + look_ahead, keys_before_end
            )
        return (keys_before_end <= 0)[None, :, None, None]


class FamilyFlashImpl(FlashAttentionImpl):
    """One layer on a family's FlashAttention.

    Attributes:
        package: the one package that ships the kernel.
        convention: what it calls the things that FlashAttention packages call differently.
        dense_function, varlen_function: symbols of the package.
    """

    package: ClassVar[PackageRequirement]
    convention: ClassVar[Convention] = FLASH_CONVENTION
    dense_function: ClassVar[str] = "flash_attn_func"
    varlen_function: ClassVar[str] = "flash_attn_varlen_func"

    def load_kernel(self) -> FlashKernel:
        """Imports the package and makes sure that its functions take what they will be given.

        Raises:
            BackendImportError: it is missing or broken, or lacks a function or a keyword.
        """
        label = f"{self.backend} ({self.variant})"
        symbols = import_symbols(label, self.package)
        dense, varlen = symbols[self.dense_function], symbols[self.varlen_function]
        check_keywords(label, self.package, dense, *DENSE_KEYWORDS)
        check_keywords(label, self.package, varlen, *VARLEN_KEYWORDS)
        return keep_kernel(FlashKernel(self.package.module, dense, varlen, self.convention))

    def _dense(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        first = self._first_with_key(query, key)
        if first == 0:
            return self._attend(query, key, value)
        output, _ = empty_attention(query, value)
        if first < query.shape[1]:
            output[:, first:] = self._attend(query[:, first:], key, value)
        return output

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The kernel on a dense call in which every query row sees a key."""
        return super()._dense(query, key, value)

    def _dense_with_lse(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = self._first_with_key(query, key)
        if first == 0:
            return super()._dense_with_lse(query, key, value)
        output, lse = empty_attention(query, value)
        if first < query.shape[1]:
            output[:, first:], lse[:, :, first:] = super()._dense_with_lse(query[:, first:], key, value)
        return output, lse

    def _first_with_key(self, query: torch.Tensor, key: torch.Tensor) -> int:
        """The first query row that sees a key. Rows from there on keep their positions, counted from the end."""
        look_ahead = _look_ahead(self.causal, self.window)
        if look_ahead is None:
            return 0
        return min(max(query.shape[1] - key.shape[1] - look_ahead, 0), query.shape[1])


def _look_ahead(causal: bool, window: tuple[int, int] | None) -> int | None:
    """How many keys behind its own position a query sees; None = all of them."""
    if causal:
        return 0
    return None if window is None or window[1] < 0 else window[1]
