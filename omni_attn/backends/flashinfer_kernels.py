"""FlashInfer as a package: what each of its kernels can do, and how it is imported.

Read in flashinfer-python 0.6.2 and 0.6.18; the parameters used here have the same names in 0.7.4.

variant   entry point                                              device               mask
cute-dsl  trtllm_ragged_attention_deepseek(backend="cute-dsl")     compute major 10     none
fa3       BatchPrefillWithRaggedKVCacheWrapper(backend="fa3")      compute major 9      none
fa2       the wrapper, and single_prefill_with_kv_cache for masks  Ampere and newer     bool, equal for all heads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from omni_attn.backends.optional_package import check_keywords, import_symbols
from omni_attn.facts import CapabilityRange, HeadSizes, KernelFacts, PackageRequirement, Variant
from omni_attn.facts.backend import BFLOAT16, FLOAT16

_INSTALL = 'pip install "omni-attn[flashinfer]"'
_WRAPPER, _SINGLE = "BatchPrefillWithRaggedKVCacheWrapper", "single_prefill_with_kv_cache"
_RAGGED = "trtllm_ragged_attention_deepseek"

WRAPPER_PACKAGE = PackageRequirement(
    distribution="flashinfer-python",
    module="flashinfer",
    symbols=(_WRAPPER, _SINGLE),
    minimum="0.6.2",
    install=_INSTALL,
)
CUTE_DSL_PACKAGE = PackageRequirement(
    distribution="flashinfer-python",
    module="flashinfer.prefill",
    symbols=(_RAGGED,),
    minimum="0.6.18",
    install=_INSTALL,
)
# What that function imports at its first call; asked for at construction, since it needs nvidia-cutlass-dsl.
_CUTE_DSL_RUNTIME = replace(CUTE_DSL_PACKAGE, module="flashinfer.attention.cute_dsl.fmha", symbols=())

FLASHINFER_FACTS = KernelFacts(
    device_kinds=frozenset({"cuda"}),
    capabilities=(CapabilityRange(minimum=(8, 0)),),
    packages=(WRAPPER_PACKAGE,),
    dtypes=frozenset({FLOAT16, BFLOAT16}),
    head_sizes=HeadSizes(allowed=(64, 128, 256)),
    mask_kinds=frozenset({"padding", "arbitrary"}),
    float_masks=False,
    head_masks=False,
    causal=True,
    causal_with_mask=True,
    gqa=True,
    packing=True,
    window=True,
    right_windows=False,
    lse=True,
    compile_mode="custom_op",
    cudagraph=True,
    sequence_parallel=frozenset({"ulysses", "ring", "ulysses_ring", "allgather_kv"}),
)
_MASKLESS = replace(FLASHINFER_FACTS, mask_kinds=frozenset(), causal_with_mask=False, device_boundaries=False)
FLASHINFER_VARIANTS = (
    Variant(
        name="cute-dsl",
        facts=replace(
            _MASKLESS,
            capabilities=(CapabilityRange(minimum=(10, 0), below=(11, 0)),),
            packages=(CUTE_DSL_PACKAGE,),
            head_sizes=HeadSizes(allowed=(128,)),
            # Windows are compiled at the first call, and a query before the first key has no tile to visit: neither
            # has been tried on the hardware, and variant fa2 serves both there.
            window=False,
            causal_unequal_lengths=False,
        ),
    ),
    Variant(
        name="fa3",
        facts=replace(
            _MASKLESS,
            capabilities=(CapabilityRange(minimum=(9, 0), below=(10, 0)),),
            tested_on=("sm_90 (H200)",),
        ),
    ),
    Variant(name="fa2", facts=replace(FLASHINFER_FACTS, tested_on=("sm_90 (H200)",))),
)

# Parameters that the calls use, by function; a version without one of them is refused when a layer is built.
_INIT_PARAMETERS = frozenset({"float_workspace_buffer", "kv_layout", "backend"})
_PLAN_PARAMETERS = frozenset(
    {"qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", "causal", "window_left"}
    | {"sm_scale", "q_data_type"}
)
_RUN_PARAMETERS = frozenset({"q", "k", "v", "out", "return_lse"})
_SINGLE_PARAMETERS = frozenset({"q", "k", "v", "packed_custom_mask", "sm_scale", "backend"})
_RAGGED_PARAMETERS = frozenset(
    {"query", "key", "value", "workspace_buffer", "seq_lens", "max_q_len", "max_kv_len", "bmm1_scale"}
    | {"bmm2_scale", "o_sf_scale", "batch_size", "window_left", "cum_seq_lens_q", "cum_seq_lens_kv"}
    | {"enable_pdl", "is_causal", "return_lse", "out", "backend"}
)


@dataclass(frozen=True)
class FlashInferKernel:
    """The entry points of one variant.

    Attributes:
        variant: fa2, fa3 or cute-dsl.
        ragged: the wrapper class of fa2 and fa3, the function of cute-dsl.
        single: the function for one sequence with a mask; None without mask support.
    """

    variant: str
    ragged: Callable[..., Any]
    single: Callable[..., Any] | None = None


# Kernels by variant, for the operators: an operator's arguments are tensors, numbers and text.
kernels: dict[str, FlashInferKernel] = {}


def import_flashinfer(variant: str | None) -> FlashInferKernel:
    """Imports the entry points of a variant; None = fa2, which runs on all devices.

    Raises:
        BackendImportError: FlashInfer is not installed, or importing it fails, or a function or parameter is missing.
    """
    variant = variant or "fa2"
    label = f"FLASHINFER_ATTN ({variant})"
    if variant == "cute-dsl":
        ragged = import_symbols(label, CUTE_DSL_PACKAGE)[_RAGGED]
        check_keywords(label, CUTE_DSL_PACKAGE, ragged, *sorted(_RAGGED_PARAMETERS))
        import_symbols(label, _CUTE_DSL_RUNTIME)
        kernel = FlashInferKernel(variant, ragged)
    else:
        wrapper, single = import_symbols(label, WRAPPER_PACKAGE).values()
        for function, parameters in (
            (wrapper.__init__, _INIT_PARAMETERS),
            (wrapper.plan, _PLAN_PARAMETERS),
            (wrapper.run, _RUN_PARAMETERS),
            (single, _SINGLE_PARAMETERS),
        ):
            check_keywords(label, WRAPPER_PACKAGE, function, *sorted(parameters))
        kernel = FlashInferKernel(variant, wrapper, single if variant == "fa2" else None)
    kernels[variant] = kernel
    return kernel
