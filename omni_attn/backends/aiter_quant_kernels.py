"""aiter.ops.mha_v4: its formats by our names, and one call for all of them.

Written after the sources of ROCm/aiter (aiter/ops/mha_v4.py and mha_v4.md). MXFP8 is asked for in two ways,
depending on the version: by a function of its own, or by the scale modes of the operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from omni_attn.backends.optional_package import check_keywords, import_symbols
from omni_attn.errors import BackendImportError
from omni_attn.facts import PackageRequirement

LABEL = "AITER_QUANT_ATTN"
MHA_V4_PACKAGE = PackageRequirement(
    distribution="amd-aiter",
    module="aiter.ops.mha_v4",
    symbols=("mha_v4", "AttentionFormat", "native_fp8_format"),
)
_NATIVE_FP8 = "native fp8"  # E4M3 in the encoding of the GPU: FNUZ on gfx942
# Format -> (of queries and keys, of values), as members of AttentionFormat.
_RECIPES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "bf16": ("BF16", "BF16"),
        "fp8": (_NATIVE_FP8, _NATIVE_FP8),
        "i8fp8": ("INT8", _NATIVE_FP8),
        "mxfp8": (_NATIVE_FP8, _NATIVE_FP8),
        "mxfp6": ("MXFP6", _NATIVE_FP8),
        "mxfp4": ("MXFP4", "MXFP4"),
        "f6f4": ("MXFP6", "MXFP4"),
        "f8f6": (_NATIVE_FP8, "MXFP6"),
    }
)


@dataclass(frozen=True)
class QuantKernel:
    """MHA v4 in one format.

    Attributes:
        format: our name of it.
        function: takes query, key, value and `operands`.
        operands: the formats of query, key and value.
    """

    format: str
    function: Callable[..., torch.Tensor]
    operands: tuple[Any, ...] = ()

    def __call__(
        self, query_BSHD: torch.Tensor, key_BSGD: torch.Tensor, value_BSGD: torch.Tensor
    ) -> torch.Tensor:
        """Output [B, Sq, H, 128] in bfloat16; scores are scaled by 128 ** -0.5."""
        query, key, value = query_BSHD.contiguous(), key_BSGD.contiguous(), value_BSGD.contiguous()
        return self.function(query, key, value, *self.operands)


# Kernels by format, for the operator below: an operator's arguments are tensors, numbers and text.
_kernels: dict[str, QuantKernel] = {}


def import_quant_kernel(name: str) -> QuantKernel:
    """The kernel of one of the formats.

    Raises:
        BackendImportError: aiter is missing or broken, or has no MHA v4, or none in this format.
    """
    symbols = import_symbols(LABEL, MHA_V4_PACKAGE)
    kernel = _mxfp8_kernel(symbols) if name == "mxfp8" else _kernel(name, symbols)
    _kernels[name] = kernel
    return kernel


def _kernel(name: str, symbols: Mapping[str, Any]) -> QuantKernel:
    query_format, value_format = (_member(word, name, symbols) for word in _RECIPES[name])
    return QuantKernel(name, symbols["mha_v4"], (query_format, query_format, value_format))


def _mxfp8_kernel(symbols: Mapping[str, Any]) -> QuantKernel:
    try:
        own = import_symbols(LABEL, _with("mha_v4_mxfp8"))
        return QuantKernel("mxfp8", own["mha_v4_mxfp8"])
    except BackendImportError:
        modes = import_symbols(LABEL, _with("AttentionScaleMode"))["AttentionScaleMode"]
    check_keywords(LABEL, MHA_V4_PACKAGE, symbols["mha_v4"], "q_scale_mode", "k_scale_mode", "v_scale_mode")
    scaled = {"q_scale_mode": modes.E8M0_PER_1X32, "k_scale_mode": modes.E8M0_PER_1X32}
    scaled["v_scale_mode"] = modes.F32_PER_TENSOR
    plain = _kernel("mxfp8", symbols)
    return replace(plain, function=functools.partial(plain.function, **scaled))


def _with(symbol: str) -> PackageRequirement:
    return PackageRequirement(
        distribution=MHA_V4_PACKAGE.distribution, module=MHA_V4_PACKAGE.module, symbols=(symbol,)
    )


def _member(word: str, name: str, symbols: Mapping[str, Any]) -> Any:
    if word == _NATIVE_FP8:
        return symbols["native_fp8_format"]()
    member = getattr(symbols["AttentionFormat"], word, None)
    if member is None:
        raise BackendImportError(
            f"{LABEL}: {MHA_V4_PACKAGE.module}.AttentionFormat has no {word}, which format {name} needs; needs "
            f"another version of {MHA_V4_PACKAGE.distribution}: `{MHA_V4_PACKAGE.install_command}`"
        )
    return member


@torch.library.custom_op("omni_attn::aiter_quant", mutates_args=())
def _aiter_quant(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, format_name: str
) -> torch.Tensor:
    return _kernels[format_name](query, key, value)


@_aiter_quant.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, format_name: str) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[-1])
