"""The FlashAttention packages as data: what each can do, and what its functions are told in their own way."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omni_attn.facts import (
    BuildFlag,
    CapabilityHeadSizes,
    CapabilityRange,
    HeadSizes,
    KernelFacts,
    PackageRequirement,
    Variant,
)
from omni_attn.facts.backend import BFLOAT16, FLOAT16

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
        install="pip install git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper",
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
# It shares the top-level module with FlashAttention 2, so that only its distribution tells that it is there. Earlier
# builds have other signatures.
FA4_PACKAGES = (
    PackageRequirement(
        distribution="flash-attn-4",
        module="flash_attn.cute",
        symbols=_FUNCTIONS,
        minimum="4.0.0b36",
        install='pip install "omni-attn[fa4]"',
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
# In the order of benchmarks/dense.py on Hopper: platforms/cuda.py has the figures. Version 2 was not measured from its
# own package; the flash kernel in torch, which descends from it, is behind both.
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
        name="fa4",
        facts=replace(
            FLASH_FACTS,
            # Its kernel for compute capability 8 has no backward and is not among what its authors name.
            capabilities=(CapabilityRange(minimum=(9, 0), below=(13, 0)),),
            # What version 4.0.0b36 checks (10, 11), and what fits the 99 KB of shared memory with room (12).
            capability_head_sizes=(
                CapabilityHeadSizes(
                    capabilities=CapabilityRange(minimum=(10, 0), below=(12, 0)),
                    head_sizes=HeadSizes(multiple_of=8, maximum=128, beside=(256,)),
                ),
                CapabilityHeadSizes(
                    capabilities=CapabilityRange(minimum=(12, 0)),
                    head_sizes=HeadSizes(multiple_of=8, maximum=128),
                ),
            ),
            tested_on=("sm_90 (H200)",),
            packages=FA4_PACKAGES,
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
class Convention:
    """What the functions of a module are told in their own way.

    Attributes:
        unlimited: a side of a window that has no end.
        lse_keyword: the argument that asks for the log-sum-exp.
    """

    unlimited: int | None = -1
    lse_keyword: str = "return_attn_probs"


#: What FlashAttention 2 and 3 agree on, and the modules that differ from it.
FLASH_CONVENTION = Convention()
CONVENTIONS = {"flash_attn.cute": Convention(unlimited=None, lse_keyword="return_lse")}
