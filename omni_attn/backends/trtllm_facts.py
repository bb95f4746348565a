"""What TRTLLM_ATTN's two kernels can do.

float16 is left to fmha_v2: no source names a float16 kernel of trtllm-gen for this call. Both align causal attention
at the bottom right by their sources; only equal lengths, where that does not matter, are offered.
"""

from __future__ import annotations

from dataclasses import replace

from omni_attn.facts import CapabilityRange, HeadSizes, KernelFacts, PackageRequirement, Variant
from omni_attn.facts.backend import BFLOAT16, FLOAT16


def _package(function: str) -> tuple[PackageRequirement, ...]:
    return (
        PackageRequirement(
            distribution="flashinfer-python",
            module="flashinfer.prefill",
            symbols=(function,),
            minimum="0.6.18",
            install='pip install "flashinfer-python>=0.6.18"',
        ),
    )


TRTLLM_FACTS = KernelFacts(
    device_kinds=frozenset({"cuda"}),
    dtypes=frozenset({FLOAT16, BFLOAT16}),
    head_sizes=HeadSizes(allowed=(128,)),
    causal=True,
    causal_unequal_lengths=False,
    gqa=True,
    packing=True,
    compile_mode="custom_op",
    cudagraph=True,
    sequence_parallel=frozenset({"ulysses"}),
)
TRTLLM_VARIANTS = (
    Variant(
        name="ragged",
        facts=replace(
            TRTLLM_FACTS,
            capabilities=(CapabilityRange(minimum=(10, 0), below=(11, 0)),),
            packages=_package("trtllm_ragged_attention_deepseek"),
            dtypes=frozenset({BFLOAT16}),
            # FlashInfer 0.6.18 asks the device in each call whether a sequence is empty, and refuses to in a capture.
            device_boundaries=False,
        ),
    ),
    Variant(
        name="fmha_v2",
        facts=replace(
            TRTLLM_FACTS,
            capabilities=(CapabilityRange(minimum=(9, 0), below=(9, 1)),),
            packages=_package("trtllm_fmha_v2_prefill"),
            tested_on=("sm_90 (H200)",),
            # On an H200 (0.6.18) with separate queries, keys and values: right for equal lengths; with more keys than
            # queries wrong by 40 %, or an illegal memory access. A check in its source is against more queries.
            unequal_lengths=False,
        ),
        explicit_only=True,
    ),
)


def trtllm_variant(name: str | None) -> Variant:
    """A variant by name; the first one where none is named."""
    return next(variant for variant in TRTLLM_VARIANTS if name in (None, variant.name))
