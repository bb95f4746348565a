"""The FlashAttention kernels: how a package is imported, and one calling convention for all.

Legend: B batch, S sequence, T packed tokens, H heads, G kv heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from omni_attn.backends.flash_packages import CONVENTIONS, FLASH_CONVENTION, FLASH_VARIANTS, Convention
from omni_attn.backends.optional_package import import_first
from omni_attn.ops.layout import unit_stride


@dataclass(frozen=True)
class FlashKernel:
    """The two functions of one FlashAttention module.

    Both take `window` as (left, right) with -1 for unlimited and align causal at the bottom right.
    """

    module: str
    flash_attn_func: Callable[..., Any]
    flash_attn_varlen_func: Callable[..., Any]
    convention: Convention = FLASH_CONVENTION

    def dense(
        self, softmax_scale: float | None, causal: bool, window: tuple[int, int]
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]:
        """The function of one layer: query, key, value of unit stride along D to [B, Sq, H, D], or to a tuple of it
        and more.

        Its arguments are bound here, once, and those that have their defaults are left out: what a layer adds to the
        kernel's own host time is paid in every call. softmax_scale None = head_size ** -0.5.
        """
        options = self._options(softmax_scale, causal, window)
        return functools.partial(self.flash_attn_func, **options) if options else self.flash_attn_func

    def dense_with_lse(
        self,
        query_BSHD: torch.Tensor,
        key_BSGD: torch.Tensor,
        value_BSGD: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, Sq, H, D] and log-sum-exp [B, H, Sq] float32."""
        output = self.flash_attn_func(
            unit_stride(query_BSHD),
            unit_stride(key_BSGD),
            unit_stride(value_BSGD),
            **self._options(softmax_scale, causal, window),
            **{self.convention.lse_keyword: True},
        )
        return output[0], output[1]

    def varlen(
        self,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window: tuple[int, int],
    ) -> torch.Tensor:
        """Output [T, H, D]; rows behind the last boundary hold anything."""
        output = self.flash_attn_varlen_func(
            unit_stride(query_THD),
            unit_stride(key_TGD),
            unit_stride(value_TGD),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            **self._options(softmax_scale, causal, window),
        )
        return first(output)

    def dense_with_lse_op(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """dense_with_lse as one opaque operator, for torch.compile."""
        *rest, window = arguments
        return torch.ops.omni_attn.flash_attn(*rest, *window, self.module)  # type: ignore[no-any-return]

    def varlen_op(self, *arguments: Any) -> torch.Tensor:
        """varlen as one opaque operator, for torch.compile."""
        *rest, window = arguments
        return torch.ops.omni_attn.flash_attn_varlen(*rest, *window, self.module)  # type: ignore[no-any-return]

    def _options(self, softmax_scale: float | None, causal: bool, window: tuple[int, int]) -> dict[str, Any]:
        """Keywords of both functions, without those that have their default."""
        options: dict[str, Any] = {} if softmax_scale is None else {"softmax_scale": softmax_scale}
        if causal:
            options["causal"] = True
        if window != (-1, -1):
            left, right = (self.convention.unlimited if side < 0 else side for side in window)
            options["window_size"] = (left, right)
        return options


def first(output: Any) -> torch.Tensor:
    """The output itself; some versions return the log-sum-exp beside it unasked."""
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


# Kernels by module name, for the operators below: an operator's arguments are tensors, numbers and text.
_kernels: dict[str, FlashKernel] = {}


def keep_kernel(kernel: FlashKernel) -> FlashKernel:
    """The kernel itself, from now on found by the operators under its module's name."""
    _kernels[kernel.module] = kernel
    return kernel


def import_flash_kernel(variant: str | None, head_size: int) -> FlashKernel:
    """Imports the module of a variant: the first installed package whose build has the head size.

    Raises:
        BackendImportError: no package of the variant is installed, or importing it fails, or a function is missing.
    """
    label = f"FLASH_ATTN ({variant})"
    variants = [v for v in FLASH_VARIANTS if variant in (None, v.name)]
    packages = [package for v in variants for package in v.facts.packages]
    found, functions = import_first(label, packages, head_size)
    convention = CONVENTIONS.get(found.module, FLASH_CONVENTION)
    return keep_kernel(FlashKernel(found.module, convention=convention, **functions))


@torch.library.custom_op("omni_attn::flash_attn", mutates_args=())
def _flash_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    module: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    window = (window_left, window_right)
    return _kernels[module].dense_with_lse(query, key, value, softmax_scale, causal, window)


@_flash_attn.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length, heads, _size = query.shape
    output = query.new_empty(batch, length, heads, value.shape[-1])
    return output, query.new_empty(batch, heads, length, dtype=torch.float32)


@torch.library.custom_op("omni_attn::flash_attn_varlen", mutates_args=())
def _flash_attn_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    module: str,
) -> torch.Tensor:
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _kernels[module].varlen(
        query, key, value, *lengths, softmax_scale, causal, (window_left, window_right)
    )


@_flash_attn_varlen.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value.shape[-1])
