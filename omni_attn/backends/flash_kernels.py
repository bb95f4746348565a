"""The FlashAttention packages: what each can do, how it is imported, and one calling convention for all.

Legend: B batch, S sequence, T packed tokens, H heads, G kv heads, D head size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from omni_attn.errors import BackendImportError
from omni_attn.facts import BuildFlag, CapabilityRange, HeadSizes, KernelFacts, PackageRequirement, Variant
from omni_attn.facts.backend import BFLOAT16, FLOAT16
from omni_attn.ops.layout import unit_stride

_FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func")

# Flags of FlashAttention 3's build; a missing head-size kernel takes the sizes above the next smaller one.
_FA3_FLAGS = (
    BuildFlag(name="FLASHATTENTION_DISABLE_FP16", dtype=FLOAT16),
    BuildFlag(name="FLASHATTENTION_DISABLE_LOCAL", feature="window"),
    BuildFlag(name="FLASHATTENTION_DISABLE_BACKWARD", feature="requires_grad"),
    BuildFlag(name="FLASHATTENTION_DISABLE_VARLEN", feature="packed", mask_usage="padding"),
    BuildFlag(name="FLASHATTENTION_DISABLE_HDIM64", head_sizes=(0, 64)),
    BuildFlag(name="FLASHATTENTION_DISABLE_HDIM96", head_sizes=(64, 96)),
    BuildFlag(name="FLASHATTENTION_DISABLE_HDIM128", head_sizes=(96, 128)),
    BuildFlag(name="FLASHATTENTION_DISABLE_HDIM192", head_sizes=(128, 192)),
    BuildFlag(name="FLASHATTENTION_DISABLE_HDIM256", head_sizes=(192, 256)),
)

FA3_PACKAGES = (
    PackageRequirement(
        distribution="flash-attn-3",
        module="flash_attn_interface",
        symbols=_FUNCTIONS,
        config_module="flash_attn_config",
        flags=_FA3_FLAGS,
        install="pip install ./flash-attention/hopper",
    ),
    PackageRequirement(
        distribution="tokenspeed-fa3",
        module="flash_attn_interface",
        symbols=_FUNCTIONS,
        config_module="flash_attn_config",
        flags=_FA3_FLAGS,
        known_flags=frozenset({"FLASHATTENTION_DISABLE_BACKWARD", "FLASHATTENTION_DISABLE_HDIM96"}),
    ),
    PackageRequirement(
        distribution="fa3-fwd",
        module="fa3_fwd_interface",
        symbols=_FUNCTIONS,
        config_module="fa3_fwd_config",
        flags=_FA3_FLAGS,
        known_flags=frozenset(
            {"FLASHATTENTION_DISABLE_BACKWARD", "FLASHATTENTION_DISABLE_LOCAL", "FLASHATTENTION_DISABLE_FP16"}
        ),
        install='pip install "omni-attn[fa3]"',
    ),
)
FA2_PACKAGES = (
    PackageRequirement(
        distribution="flash-attn",
        module="flash_attn",
        symbols=_FUNCTIONS,
        minimum="2.6",
        below="3",
        install='pip install "omni-attn[flash-attn]"',
    ),
)

FLASH_FACTS = KernelFacts(
    device_kinds=frozenset({"cuda"}),
    dtypes=frozenset({FLOAT16, BFLOAT16}),
    head_sizes=HeadSizes(multiple_of=8, maximum=256),
    mask_kinds=frozenset({"padding"}),
    causal=True,
    gqa=True,
    packing=True,
    window=True,
    lse=True,
    backward=True,
    compile_mode="custom_op",
    cudagraph=True,
    sequence_parallel=frozenset({"ulysses", "ring", "ulysses_ring", "allgather_kv"}),
)
FLASH_VARIANTS = (
    Variant(
        name="fa3",
        facts=replace(
            FLASH_FACTS,
            capabilities=(CapabilityRange(minimum=(9, 0), below=(10, 0)),),
            packages=FA3_PACKAGES,
            tested_on=("sm_90 (H200)",),
        ),
    ),
    Variant(
        name="fa2",
        facts=replace(
            FLASH_FACTS,
            capabilities=(CapabilityRange(minimum=(8, 0), below=(10, 0)),),
            packages=FA2_PACKAGES,
        ),
    ),
)


@dataclass(frozen=True)
class FlashKernel:
    """The two functions of one FlashAttention module.

    Both take `window` as (left, right) with -1 for unlimited and align causal at the bottom right.
    """

    module: str
    flash_attn_func: Callable[..., Any]
    flash_attn_varlen_func: Callable[..., Any]

    def dense(self, *arguments: Any) -> torch.Tensor:
        """Output [B, Sq, H, D]; arguments as of `dense_with_lse`."""
        return _first(self._attend(*arguments))

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
        output = self._attend(
            query_BSHD, key_BSGD, value_BSGD, softmax_scale, causal, window, return_attn_probs=True
        )
        return output[0], output[1]

    def _attend(
        self,
        query_BSHD: torch.Tensor,
        key_BSGD: torch.Tensor,
        value_BSGD: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window: tuple[int, int],
        **extra: bool,
    ) -> Any:
        return self.flash_attn_func(
            unit_stride(query_BSHD),
            unit_stride(key_BSGD),
            unit_stride(value_BSGD),
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window,
            **extra,
        )

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
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window,
        )
        return _first(output)

    def dense_with_lse_op(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """dense_with_lse as one opaque operator, for torch.compile."""
        *rest, window = arguments
        return torch.ops.omni_attn.flash_attn(*rest, *window, self.module)  # type: ignore[no-any-return]

    def varlen_op(self, *arguments: Any) -> torch.Tensor:
        """varlen as one opaque operator, for torch.compile."""
        *rest, window = arguments
        return torch.ops.omni_attn.flash_attn_varlen(*rest, *window, self.module)  # type: ignore[no-any-return]


def _first(output: Any) -> torch.Tensor:
    """The output itself; some versions return the log-sum-exp beside it unasked."""
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


# Kernels by module name, for the operators below: an operator's arguments are tensors, numbers and text.
_kernels: dict[str, FlashKernel] = {}


def import_flash_kernel(variant: str | None, head_size: int) -> FlashKernel:
    """Imports the module of a variant: the first installed package whose build has the head size.

    Raises:
        BackendImportError: no package of the variant is installed, or importing it fails, or a function is missing.
    """
    variants = [v for v in FLASH_VARIANTS if variant in (None, v.name)]
    packages = [package for v in variants for package in v.facts.packages]
    for package in packages:
        if package.lacks_head_size(head_size):
            continue
        try:
            module = importlib.import_module(package.module)
        except ModuleNotFoundError as error:
            if error.name == package.module:
                continue
            raise _broken(variant, package, error) from error
        except Exception as error:
            raise _broken(variant, package, error) from error
        functions = {name: getattr(module, name, None) for name in package.symbols}
        lacking = [name for name, function in functions.items() if not callable(function)]
        if lacking:
            raise BackendImportError(
                f"FLASH_ATTN ({variant}): module {package.module} has no function {', '.join(lacking)}; "
                f"reinstall it: `{package.install_command}`"
            )
        kernel = FlashKernel(package.module, **functions)  # type: ignore[arg-type]
        _kernels[package.module] = kernel
        return kernel
    modules = " or ".join(dict.fromkeys(package.module for package in packages))
    commands = " or ".join(f"`{package.install_command}`" for package in packages)
    raise BackendImportError(
        f"FLASH_ATTN ({variant}): module {modules} is not installed; install it: {commands}"
    )


def _broken(variant: str | None, package: PackageRequirement, error: Exception) -> BackendImportError:
    return BackendImportError(
        f"FLASH_ATTN ({variant}): {package.module} is installed but broken: {type(error).__name__}: {error}; "
        f"reinstall it for this torch: `{package.install_command}`"
    )


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
