"""How FlashAttention is called over pages: one function per version, which writes into a given output.

Legend: R requests, T query tokens, W pages of a request, N pages, P tokens of a page, H heads, G kv heads, D head size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from omni_attn.backends.flash_kernels import first
from omni_attn.backends.flash_packages import CONVENTIONS, FLASH_CONVENTION
from omni_attn.backends.flash_paged_packages import FLASH_PAGED_FACTS, PAGED_FUNCTIONS
from omni_attn.backends.optional_package import check_keywords, import_first
from omni_attn.ops.layout import unit_stride

#: Of the operator behind FlashAttention 3's function; a build whose operator has other ones is called by the function.
_OPERATOR_ARGUMENTS = frozenset(
    {"q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "page_table", "softmax_scale"}
    | {"is_causal", "window_size_left", "window_size_right"}
)
_FA3_KEYWORDS = ("cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q")
_FA4_KEYWORDS = ("seqused_k", "page_table", "cu_seqlens_q", "max_seqlen_q")
_SHARED_KEYWORDS = ("softmax_scale", "causal", "window_size")


@dataclass(frozen=True)
class PagedFlashKernel:
    """One version's function over pages.

    Attributes:
        module: where it comes from.
        function: of PAGED_FUNCTIONS; operator: FlashAttention 3's own operator, which takes the output to write into.
    """

    variant: str
    module: str
    function: Callable[..., Any]
    operator: Callable[..., Any] | None = None

    def attend(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        output_THD: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table_RW: torch.Tensor,
        max_query_len: int,
        softmax_scale: float,
        causal: bool,
        window: tuple[int, int],
    ) -> None:
        """Writes the output of tokens that belong to a request; the rest of it holds anything.

        Args:
            kv_cache: [N, 2, P, G, D] of any strides that leave D dense.
            window: (left, right), -1 = unlimited.
        """
        keys, values = kv_cache.unbind(1)
        # The kernels refuse parts of larger tables.
        query_start_loc, seq_lens = unit_stride(query_start_loc), unit_stride(seq_lens)
        block_table_RW = unit_stride(block_table_RW)
        if self.operator is not None:
            written = output_THD if output_THD.stride(-1) == 1 else output_THD.new_empty(output_THD.shape)
            self.operator(
                q=unit_stride(query_THD),
                k=keys,
                v=values,
                out=written,
                cu_seqlens_q=query_start_loc,
                seqused_k=seq_lens,
                max_seqlen_q=max_query_len,
                page_table=block_table_RW,
                softmax_scale=softmax_scale,
                is_causal=causal,
                window_size_left=window[0],
                window_size_right=window[1],
            )
            if written is not output_THD:
                output_THD.copy_(written)
            return
        lengths = "cache_seqlens" if self.variant == "fa3" else "seqused_k"
        unlimited = CONVENTIONS.get(self.module, FLASH_CONVENTION).unlimited
        left, right = (unlimited if side < 0 else side for side in window)
        result = self.function(
            unit_stride(query_THD),
            keys,
            values,
            cu_seqlens_q=query_start_loc,
            max_seqlen_q=max_query_len,
            page_table=block_table_RW,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=(left, right),
            **{lengths: seq_lens},
        )
        output_THD.copy_(first(result))


# Kernels by module name, for the operator below: an operator's arguments are tensors, numbers and text.
_kernels: dict[str, PagedFlashKernel] = {}


def keep_paged_kernel(kernel: PagedFlashKernel) -> PagedFlashKernel:
    """The kernel itself, from now on found by the operator under its module's name."""
    _kernels[kernel.module] = kernel
    return kernel


def import_paged_flash_kernel(variant: str | None, head_size: int) -> PagedFlashKernel:
    """Imports the function of a variant from the first installed package whose build has pages and the head size.

    Raises:
        BackendImportError: no package of the variant is installed, or importing it fails, or a function is missing.
    """
    label = f"FLASH_ATTN ({variant})"
    found = next(v for v in FLASH_PAGED_FACTS.variants if variant in (None, v.name))
    package, functions = import_first(label, found.facts.packages, head_size)
    function = functions[PAGED_FUNCTIONS[found.name]]
    own = _FA3_KEYWORDS if found.name == "fa3" else _FA4_KEYWORDS
    check_keywords(label, package, function, *own, *_SHARED_KEYWORDS)
    operator = _operator(package.module) if found.name == "fa3" else None
    return keep_paged_kernel(PagedFlashKernel(found.name, package.module, function, operator))


def _operator(module: str) -> Callable[..., Any] | None:
    """FlashAttention 3's operator, which its public function calls without an output: one copy less for us."""
    operators = getattr(importlib.import_module(module), "flash_attn_3_gpu", None)
    operator: Callable[..., Any] | None = getattr(operators, "fwd", None)
    schema = getattr(getattr(operator, "default", None), "_schema", None)
    names = {argument.name for argument in schema.arguments} if schema is not None else set()
    return operator if names >= _OPERATOR_ARGUMENTS else None


@torch.library.custom_op("omni_attn::flash_attn_paged", mutates_args=("output",))
def flash_attn_paged(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_query_len: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    module: str,
) -> None:
    """PagedFlashKernel.attend as one opaque operator, for torch.compile."""
    step = (query_start_loc, seq_lens, block_table, max_query_len)
    window = (window_left, window_right)
    _kernels[module].attend(query, kv_cache, output, *step, softmax_scale, causal, window)


@flash_attn_paged.register_fake
def _(query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor, *_: object) -> None:
    return None
